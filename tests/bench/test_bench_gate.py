"""The gate lets the reference through at every declared kernel, and nothing that is wrong in a single element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from bench_problems import SMALL, answer, handed_over, problem_of, right_answer

from conformance.adapters.reference import Reference
from conformance.bench import gate
from conformance.bench.gate import Refused
from conformance.interface import Description

HONEST = Description("port", "1")
IDS = [declared.id for declared in SMALL]
Results = tuple[torch.Tensor, ...]


def judged(name: str, returned: Any, call: int = 0, description: Description = HONEST) -> str:
    """What is wrong with it, empty if nothing is."""
    try:
        gate.judge(problem_of(name), description, call, returned)
    except Refused as reason:
        return str(reason)
    return ""


@pytest.mark.parametrize("name", IDS)
def test_right_results_pass_in_every_set(name: str) -> None:
    assert judged(name, right_answer(name, 0), 0) == ""
    assert judged(name, right_answer(name, 3), 3) == ""


@pytest.mark.parametrize("name", IDS)
def test_results_of_another_call_are_refused(name: str) -> None:
    """What a kernel that hands out its last results again would return."""
    assert judged(name, right_answer(name, 0), 3)


def rows_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    lead = len(problem_of(name).rows)
    return tensor.view(-1, *tensor.shape[lead:])


def one_bit(name: str, results: Results) -> None:
    """A high bit of the last element of the first result."""
    last = results[0].view(torch.uint8).view(-1)
    last[-1] ^= 0x20


def one_row(name: str, results: Results) -> None:
    """The last row is that of another of the pool."""
    which = problem_of(name).which(0)
    other = int(np.flatnonzero(which != which[-1])[0])
    for tensor in results:
        rows = rows_of(name, tensor)
        rows[-1] = rows[other]


def zeros(name: str, results: Results) -> None:
    for tensor in results:
        tensor.view(torch.uint8).zero_()


def poisoned(name: str, results: Results) -> None:
    gate.poison(results)


def poisoned_row(name: str, results: Results) -> None:
    gate.poison(rows_of(name, results[0])[-1:])


def last_column(name: str, results: Results) -> None:
    """The last feature of every row is that of the one before."""
    rows = rows_of(name, results[0]).view(torch.uint8) if results[0].element_size() == 1 else rows_of(name, results[0])
    rows[..., -1] = rows[..., -2] + (rows[..., -1] == rows[..., -2]).to(rows.dtype)


FAULTS: list[Callable[[str, Results], None]] = [one_bit, one_row, zeros, poisoned, poisoned_row, last_column]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", IDS)
def test_one_wrong_element_is_refused(name: str, fault: Callable[[str, Results], None]) -> None:
    if fault is one_row and np.prod(problem_of(name).rows) == 1:
        pytest.skip("it has one row")
    results = tuple(tensor.clone() for tensor in right_answer(name, 0))
    fault(name, results)
    assert judged(name, results)


def test_shapes_dtypes_and_numbers_of_results() -> None:
    name = "rms_norm/small"
    (out,) = right_answer(name, 0)
    assert "wrong shape" in judged(name, out[:-1])
    assert "wrong shape" in judged(name, out[:, :-1])
    assert "dtype" in judged(name, out.half())
    assert "expected 1 results (out), got 2" in judged(name, (out, out))
    assert "neither torch, numpy nor DLPack" in judged(name, None)
    assert judged(name, out.float()) == judged(name, out.float().numpy()) == ""


def test_the_message_names_the_row() -> None:
    name = "rms_norm/small"
    out = right_answer(name, 0)[0].clone()
    out[200, 7] += 1
    assert "first in row 200" in judged(name, out)


class LastInput(Reference):
    """The last input is left out of every sum."""

    def linear_fp8(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[..., -1] = 0
        return super().linear_fp8(x, weight, scale)

    def linear_bf16(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().linear_bf16(x[..., :-1], weight[:, :-1])


class Truncating(Reference):
    """Results are cut off instead of rounded."""

    def linear_fp4(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        exact = super().dequantize_fp4_weight(weight, scale).float()
        out = super().fake_quantize_fp8(x).float() @ exact.T
        return (out.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


class NarrowSum(Reference):
    """Sums in bf16."""

    def hyper_connection_read(self, h: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(h[..., 0, :])
        for stream in range(h.shape[-2]):
            out = (out + pre[..., stream, None].bfloat16() * h[..., stream, :]).bfloat16()
        return out


class WrongExpert(Reference):
    """Another expert than the chosen one, for one token."""

    def experts(self, config: Any, weights: Any, x: Any, routing_weights: Any, expert_indices: Any) -> torch.Tensor:
        indices = expert_indices.clone()
        indices[-1, -1] = next(n for n in range(config["n_routed_experts"]) if n not in indices[-1])
        return super().experts(config, weights, x, routing_weights, indices)


class ShortList(Reference):
    """The last listed row is not attended to."""

    def sparse_attention(self, q: Any, kv: Any, indices: Any, sink: Any, scale: float) -> torch.Tensor:
        return super().sparse_attention(q, kv, indices[..., :-1], sink, scale)


class NoSink(Reference):
    def sparse_attention(self, q: Any, kv: Any, indices: Any, sink: Any, scale: float) -> torch.Tensor:
        return super().sparse_attention(q, kv, indices, torch.full_like(sink, -1e9), scale)


class Duplicates(Reference):
    """A row that is listed twice counts once."""

    def sparse_attention(self, q: Any, kv: Any, indices: Any, sink: Any, scale: float) -> torch.Tensor:
        twice = (indices[..., :1] == indices[..., 1:2]) & (indices[..., :1] >= 0)
        indices = torch.cat([indices[..., :1].masked_fill(twice, -1), indices[..., 1:]], -1)
        return super().sparse_attention(q, kv, indices, sink, scale)


class NextBest(Reference):
    """One of the best positions is left out for another."""

    def select_positions(self, config: Any, layer_id: int, scores: Any, positions: Any) -> torch.Tensor:
        best = scores.argmax(-1, keepdim=True)
        return super().select_positions(config, layer_id, scores.scatter(-1, best, -1e4), positions)


class Unseen(Reference):
    """Positions that the query does not see are scored."""

    def index_scores(self, *, positions: Any, **rest: Any) -> torch.Tensor:
        return super().index_scores(positions=torch.full_like(positions, 1 << 20), **rest)


class FewRounds(Reference):
    """One Sinkhorn round is left out."""

    def hyper_connection_coefficients(self, config: Any, **rest: Any) -> Any:
        return super().hyper_connection_coefficients({**config, "hc_sinkhorn_iters": 2}, **rest)


class NearestScale(Reference):
    """The scale of the fused quantiser is half of what it should be, where the codes then saturate."""

    def quantize_fp8(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = super().quantize_fp8(x)
        raw = scales.view(torch.uint8).clone()
        raw[0, 0] -= 1
        doubled = (codes[0, :32].float() * 2).clamp(-448, 448)
        codes = codes.clone()
        codes[0, :32] = doubled.to(codes.dtype)
        return codes, raw.view(torch.float8_e8m0fnu)


class LargerScale(Reference):
    """Codes of half the size under twice the scale: where nothing is lost the values are the same."""

    def quantize_fp8(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = super().quantize_fp8(x)
        raw = scales.view(torch.uint8).clone()
        raw[-1, -1] += 1
        codes = codes.clone()
        codes[-1, -32:] = (codes[-1, -32:].float() / 2).to(codes.dtype)
        return codes, raw.view(torch.float8_e8m0fnu)


class NoBias(Reference):
    """Image tokens are routed with the text bias."""

    def gate(self, config: Any, weights: Any, x: Any, image_mask: Any) -> Any:
        return super().gate(config, weights, x, torch.zeros_like(image_mask))


class NoBarrier(Reference):
    def engram_hash(self, *, image_mask: Any, **rest: Any) -> torch.Tensor:
        return super().engram_hash(image_mask=None, **rest)


@pytest.mark.parametrize(
    ("name", "port"),
    [
        ("linear_fp8/small", LastInput),
        ("linear_bf16/small", LastInput),
        ("linear_fp4/small", Truncating),
        ("hyper_connection_read/small", NarrowSum),
        ("hyper_connection_coefficients/small", FewRounds),
        ("experts/small", WrongExpert),
        ("sparse_attention/small", ShortList),
        ("sparse_attention/small-requests", ShortList),
        ("sparse_attention/small", NoSink),
        ("sparse_attention/small", Duplicates),
        ("index_select/small", NextBest),
        ("norm_quantize/small", NearestScale),
        ("norm_quantize/small", LargerScale),
        ("gate/small", NoBias),
        ("engram_hash/small", NoBarrier),
    ],
)
def test_known_mistakes_are_refused(name: str, port: type[Reference]) -> None:
    assert judged(name, answer(port(), name, 0))


def test_unseen_positions_are_refused() -> None:
    """The second of the pool does not see the last positions."""
    assert judged("index_select/small", answer(Unseen(), "index_select/small", 1), 1)


def test_declared_conventions_are_followed() -> None:
    """A port that clears the sign of zero codes is judged by what it declares."""
    name = "quantize_fp4_e8m0/small"
    codes, scales = right_answer(name, 0)
    low, high = codes & 15, codes >> 4
    cleared = torch.where(low == 8, 0, low) | (torch.where(high == 8, 0, high) << 4)
    assert not torch.equal(cleared, codes)
    declaring = Description("port", "1", conventions={"negative-zero-code": "cleared"})
    assert "negative-zero-code" in judged(name, (cleared, scales))
    assert judged(name, (cleared, scales), description=declaring) == ""


def test_results_in_the_memory_of_inputs_are_found() -> None:
    inputs = list(handed_over(problem_of("rms_norm/small"), 0).values())
    x = next(value for value in inputs if isinstance(value, torch.Tensor))
    assert gate.aliased(x[3:], inputs)
    assert not gate.aliased(x.clone(), inputs)
    assert gate.aliased(x.float().numpy()[::2], [x.float().numpy()]) is False
    array = np.zeros(8)
    assert gate.aliased(array[2:], [array])
