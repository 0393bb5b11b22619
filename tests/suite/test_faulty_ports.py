"""Ports with one mistake each: the case that is named after the mistake fails, and says where.

The catalogue of faults that ship with the suite is wider; here each way of being wrong is written as a porter would
write it, and what is looked at is the report: component, layer, call and position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from golden_sets import Run, make_golden_sets
from test_other_configurations import PAIRED_CANDIDATES

import reference.attention
import reference.block
import reference.config
import reference.experts
import reference.indexer
import reference.linear
import reference.rotary
from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference, ReferenceStateful
from conformance.cases.case import Case
from conformance.cases.catalogue import cases_of
from conformance.cases.noise_floors import floors_of
from conformance.cases.traces import GoldenModel
from conformance.fixtures import Fixtures
from conformance.interface import Array, Config, Stateful, Weights
from conformance.runner import CaseResult, run_case

Patch = Mapping[str, Any]
"""Attributes below `reference` to replace while the port runs."""


@cache
def cases() -> dict[str, Case]:
    """Cases of the shipped model set by id."""
    fixtures = Fixtures.open(verify=False)
    golden = GoldenModel(fixtures.model("tiny"))
    return {case.id: case for case in cases_of(golden, floors_of(fixtures, golden))}


@contextmanager
def replaced(patch: Patch) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for target, value in patch.items():
            monkeypatch.setattr(f"reference.{target}", value)
        yield


def run(port: Reference, case: Case, patch: Patch | None = None) -> CaseResult:
    with replaced(patch or {}):
        return run_case(case, InProcess(port))


# Stateless mistakes, as overridden methods


class CombTransposed(Reference):
    def hyper_connection_write(self, y: Array, h: Array, post: Array, comb: Array) -> Array:
        return super().hyper_connection_write(y, h, post, comb.transpose(-1, -2))


class SinkIgnored(Reference):
    def sparse_attention(self, q: Array, kv: Array, indices: Array, sink: Array, scale: float) -> Array:
        return super().sparse_attention(q, kv, indices, torch.full_like(sink, -torch.inf), scale)


class YarnLeftOut(Reference):
    def rotary_frequencies(self, config: Config, layer_id: int) -> Array:
        return reference.rotary.base_frequencies(config["rope_head_dim"], config["compress_rope_theta"])


class TurnedByGroupNumber(Reference):
    def compressed_rows(self, config: Config, layer_id: int, latent: Array, positions: Array) -> Array:
        return super().compressed_rows(config, layer_id, latent, positions // config["compress_ratios"][layer_id])


class BiasInWeights(Reference):
    def gate(self, config: Config, weights: Weights, x: Array, image_mask: Array | None) -> tuple[Array, Array]:
        _, indices = super().gate(config, weights, x, image_mask)
        logits = x.float() @ weights["weight"].float().T
        scores = torch.nn.functional.softplus(logits).sqrt() + weights["bias"]
        chosen = scores.gather(-1, indices.long())
        return chosen / chosen.sum(-1, keepdim=True) * config["route_scale"], indices


class LookBackPastImages(Reference):
    def engram_hash(
        self, config: Config, layer_id: int, token_map: Array, input_ids: Array, image_mask: Array | None
    ) -> Array:
        right = super().engram_hash(config, layer_id, token_map, input_ids, image_mask)
        blind = super().engram_hash(config, layer_id, token_map, input_ids, None)
        return right if image_mask is None else torch.where(image_mask.unsqueeze(-1), right, blind)


class OneUlpInOneColumn(Reference):
    def attention_output(self, config: Config, layer_id: int, weights: Weights, o: Array, positions: Array) -> Array:
        out = super().attention_output(config, layer_id, weights, o, positions)
        out.view(torch.int16)[..., 5] += 1
        return out


class OneNan(Reference):
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        out = super().rms_norm(x, weight, eps)
        out[0, -1, 7] = torch.nan
        return out


class Zeros(Reference):
    def experts(
        self, config: Config, weights: Weights, x: Array, routing_weights: Array, expert_indices: Array
    ) -> Array:
        return torch.zeros_like(x)


class Raises(Reference):
    def rotate(self, config: Config, layer_id: int, x: Array, positions: Array, inverse: bool) -> Array:
        raise IndexError("position out of range")


class WrongShape(Reference):
    def linear_bf16(self, x: Array, weight: Array) -> Array:
        return super().linear_bf16(x, weight).flatten(0, 1)


class NotRounded(Reference):
    def linear_fp8(self, x: Array, weight: Array, scale: Array) -> Array:
        return reference.quantize.quantized_fp8(x) @ reference.quantize.fp8_weight(weight, scale).mT


class WrongDtype(Reference):
    def window_indices(self, config: Config, start_pos: int, length: int) -> Array:
        return super().window_indices(config, start_pos, length).float()


class WritesIntoItsInput(Reference):
    def hyper_connection_read(self, h: Array, pre: Array) -> Array:
        out = super().hyper_connection_read(h, pre)
        h[..., 0, :] = out
        return out


# Mistakes inside stateful objects, as replaced parts


def ring_off_by_one(config: Any, ring: torch.Tensor, rows: torch.Tensor, start_pos: Any) -> torch.Tensor:
    return RIGHT["attention.window_update"](config, ring, rows, start_pos + 1)


def stale_row_at_the_wrap(config: Any, ring: torch.Tensor, rows: torch.Tensor, start_pos: Any) -> torch.Tensor:
    updated = RIGHT["attention.window_update"](config, ring, rows, start_pos)
    wrapped = rows.shape[1] == 1 and int(start_pos[0]) % config.window_size == 0
    return ring if wrapped else updated


def no_relu(q: torch.Tensor, w: torch.Tensor, keys: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    with mock.patch.object(torch, "relu", lambda x: x):
        return RIGHT["indexer._score_heads"](q, w, keys, compute)


def clamp_two_sided(config: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return RIGHT["experts.clamped_swiglu"](config, gate.clamp(min=-config.swiglu_limit), up)


def own_mix(block: Any, h: torch.Tensor, pre: torch.Tensor, norm: str) -> torch.Tensor:
    own, _, _ = block._coefficients(h, norm.removesuffix("_norm"))
    return RIGHT["block.Block._read"](block, h, own, norm)


def first_request_for_all(config: Any, before: Any, after: Any, rows: Any, start: int) -> torch.Tensor:
    """Remembers the ring of the request that was asked for first in a step, and gives it to all others."""
    if start and rows.shape[0] == 1:
        FIRST_RING.setdefault(start, after)
        after = FIRST_RING[start]
    return RIGHT["attention.window_context"](config, before, after, rows, start)


FIRST_RING: dict[int, torch.Tensor] = {}

RIGHT: dict[str, Callable[..., Any]] = {
    "attention.window_update": reference.attention.window_update,
    "attention.window_context": reference.attention.window_context,
    "indexer._score_heads": reference.indexer._score_heads,
    "experts.clamped_swiglu": reference.experts.clamped_swiglu,
    "block.Block._read": reference.block.Block._read,
}


class CarryLost(Reference):
    def compressor(self, config: Config, layer_id: int, weights: Weights, batch_size: int) -> Stateful:
        made = super().compressor(config, layer_id, weights, batch_size)
        assert isinstance(made, ReferenceStateful)
        inner = made.inner

        class Forgetful(Stateful):
            def step(self, **inputs: Array) -> Mapping[str, Array]:
                inner.carry_kv = torch.zeros_like(inner.carry_kv)  # type: ignore[attr-defined]
                return made.step(**inputs)

            def state(self) -> Mapping[str, Array]:
                return made.state()

        return Forgetful()


@dataclass(frozen=True)
class Fault:
    """A port, the case that must fail, and words that the report of the failure must hold."""

    port: type[Reference]
    case: str
    tap: str
    where: tuple[str, ...]
    patch: Patch | None = None
    message: str = "beyond"
    """Words of the verdict, or of the result where no verdict was reached."""
    status: str = "FAIL"


STATEFUL = Reference
"""The mistake is in the patch."""


def no_yarn(config: Any, compressed: bool) -> torch.Tensor:
    base = config.compress_rope_theta if compressed else config.rope_theta
    return reference.rotary.base_frequencies(config.rope_head_dim, base)


FAULTS: dict[str, Fault] = {
    "ring-off-by-one": Fault(
        STATEFUL,
        "attention/window-only/decode-into-wrap",
        "attn_out",
        ("layer 1", "call 1", "position 14"),
        {"attention.window_update": ring_off_by_one},
    ),
    "ring-off-by-one-once-it-is-full": Fault(
        STATEFUL,
        "attention/window-only/decode-after-wrap",
        "window",
        ("layer 0", "state after 5", "slot 0"),
        {"attention.window_update": ring_off_by_one},
    ),
    "stale-row-in-the-window": Fault(
        STATEFUL,
        "attention/window-only/decode-across-wrap",
        "attn_out",
        ("layer 0", "call 4", "position 16"),
        {"attention.window_update": stale_row_at_the_wrap},
    ),
    "comb-transposed": Fault(
        CombTransposed,
        "hyper_connections/write-comb-orientation/attention",
        "out",
        # Before that all streams are alike, and comb is doubly stochastic.
        ("layer 1", "decode-from-01/0", "position 0", "stream 0"),
    ),
    "reads-with-its-own-mix": Fault(
        STATEFUL,
        "block/mix-one-sublayer-late-source-ratio-2/prefill-several-windows",
        "attn_in",
        ("layer 2", "call 0", "position 0"),
        {"block.Block._read": own_mix},
    ),
    "candidates-ignored": Fault(
        STATEFUL,
        "attention/re-indexing/prefill-several-windows",
        "attn_out",
        # The first query that sees more blocks of 4 than the 3 that are kept.
        ("layer 8", "call 0", "position 12"),
        {"config.Config.uses_candidates": lambda config, layer: False},
    ),
    "index-relu-missing": Fault(
        STATEFUL,
        "indexer/scores-relu-and-three-roundings/trace",
        "index_score",
        ("layer 2", "call 2", "position 2", "compressed position 0"),
        {"indexer._score_heads": no_relu},
    ),
    "sink-ignored": Fault(
        SinkIgnored,
        "sparse_attention/sink-and-listed-rows/prefill-several-windows",
        "attn_o",
        ("layer 0", "call 0", "position 0", "head 0"),
    ),
    "yarn-left-out": Fault(
        YarnLeftOut, "rotary/frequencies/compressed", "frequencies", ("layer 2", "pair 1"), message="differ"
    ),
    "yarn-left-out-of-an-attention": Fault(
        STATEFUL,
        "attention/source-ratio-2/prefill-several-windows",
        "attn_out",
        ("layer 2", "call 0", "position 10"),
        {"rotary._frequencies": no_yarn},
    ),
    "row-turned-by-its-group-number": Fault(
        TurnedByGroupNumber,
        "compressor/row-position-and-scale-format/ratio-2",
        "compressed_rows",
        ("layer 2", "group 1"),
    ),
    "carry-lost": Fault(
        CarryLost,
        "compressor/carry-ratio-2/decode-across-wrap",
        "latent",
        # Position 12 waits after a prompt of 13.
        ("layer 2", "call 1", "group 0"),
    ),
    "bias-in-the-weights": Fault(
        BiasInWeights,
        "gate/bias-selects-but-does-not-weigh/trace",
        "gate_weights",
        ("layer 0", "decode-from-01/0", "position 0", "choice 0"),
    ),
    "clamp-two-sided": Fault(
        STATEFUL,
        "experts/weighted-sum-and-clamps/trace",
        "ffn_out",
        ("layer 5", "decode-from-01/3", "position 3"),
        {"experts.clamped_swiglu": clamp_two_sided},
    ),
    "look-back-past-an-image": Fault(
        LookBackPastImages,
        "engram/hash/image-barrier",
        "engram_hash",
        ("layer 1", "call 0", "position 16", "column 0"),
        message="differ",
    ),
    "one-ulp-in-one-column": Fault(
        OneUlpInOneColumn,
        "attention/output-turned-back-and-grouped/trace",
        "attn_out",
        ("layer 0", "decode-from-01/0", "position 0", "feature 5"),
    ),
    "one-nan": Fault(OneNan, "norm/rms/block-inputs", "out", ("layer 0", "prefill-45/0", "position 44", "feature 7")),
    "all-zeros": Fault(
        Zeros, "experts/weighted-sum-and-clamps/trace", "ffn_out", ("layer 0", "position 0", "feature 0")
    ),
    "raises": Fault(
        Raises,
        "rotary/pairs-adjacent-forward/compressed",
        "",
        ("layer 2",),
        message="rotate raised IndexError: position out of range",
        status="CRASH",
    ),
    "wrong-shape": Fault(WrongShape, "linear/bf16-weight/many-tokens", "out", ("layer 2",), message="wrong shape"),
    "wrong-dtype": Fault(
        WrongDtype, "window/prefill-list/several-windows", "indices", (), message="wrong dtype F32, expected I32"
    ),
    "last-rounding-left-out": Fault(
        NotRounded, "linear/fp8-weight/many-tokens", "out", ("layer 0",), message="not rounded to BF16"
    ),
    "writes-into-its-input": Fault(
        WritesIntoItsInput,
        "hyper_connections/read/attention",
        "",
        ("layer 1",),
        message="hyper_connection_read modified its input h",
    ),
    "another-requests-ring": Fault(
        STATEFUL,
        "model/free-running/batch-of-3",
        "layer1/window",
        ("call state after 2", "request 2"),
        {"attention.window_context": first_request_for_all},
        message="relative distance",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_case_fails_and_says_where(name: str) -> None:
    fault = FAULTS[name]
    FIRST_RING.clear()
    result = run(fault.port(), cases()[fault.case], fault.patch)
    assert result.status == fault.status
    if fault.tap:
        assert result.first_failure is not None
        assert result.first_failure.verdict.tap == fault.tap
        where, message = result.first_failure.where, result.first_failure.verdict.message
    else:
        where, message = result.reached, result.message
    assert fault.message in message
    assert result.case.component == fault.case.partition("/")[0]
    words = where.split(", ")
    for word in fault.where:
        assert any(word == part or part.endswith(f" {word}") for part in words), where


@pytest.mark.parametrize("case_id", sorted({fault.case for fault in FAULTS.values()}))
def test_the_same_cases_pass_without_the_mistake(case_id: str) -> None:
    assert run(Reference(), cases()[case_id]).status == "PASS"


def test_another_requests_ring_in_an_attention_alone(tmp_path: Path) -> None:
    """The shipped set has a batch in a scenario of the whole model only: a set of one's own may have it everywhere."""
    runs = (Run("pair", 4, steps=3, batch=2),)
    make_golden_sets(tmp_path / "sets", "pairs", PAIRED_CANDIDATES, runs)
    fixtures = Fixtures.open(tmp_path / "sets")
    golden = GoldenModel(fixtures.model("pairs"))
    by_id = {case.id: case for case in cases_of(golden, floors_of(fixtures, golden))}
    FIRST_RING.clear()
    result = run(
        Reference(), by_id["attention/source-ratio-2/batch-of-2"], {"attention.window_context": first_request_for_all}
    )
    assert result.status == "FAIL"
    assert result.first_failure is not None
    assert result.first_failure.where.startswith("layer 0, call 1, request 1, position 4")
