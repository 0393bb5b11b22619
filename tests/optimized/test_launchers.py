"""What launchers say to arguments that do not belong together, and that layout in memory does not change results."""

from __future__ import annotations

from optimized.device import DEVICE

# ruff: isort: split
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.fixtures import Fixtures
from optimized import (
    candidates,
    engram,
    expert_stack,
    gate,
    hyper_connections,
    indexer,
    linear,
    norm,
    output_projection,
    quantize,
    rotary,
    selection,
    sparse_attention,
)
from optimized.config import Config

CONFIG = Config.from_mapping(Fixtures.open(None).model("tiny").config)
INDEXED = next(layer for layer in CONFIG.index_source_layers if CONFIG.ratio(layer) > 0)


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16, device=DEVICE)


def fp32(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=DEVICE)


def codes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=DEVICE)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=DEVICE)


def positions(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=DEVICE)


def attend(**changed: Any) -> torch.Tensor:
    given = {"q": bf16(1, 2, 4, 32), "kv": bf16(1, 8, 32), "indices": ints(1, 2, 3), "sink": fp32(4), "scale": 0.1}
    return sparse_attention.sparse_attention(**(given | changed))


def score(**changed: Any) -> torch.Tensor:
    given = {
        "queries": bf16(1, 2, 4, 32),
        "head_weights": bf16(1, 2, 4),
        "keys": bf16(1, 8, 32),
        "positions": positions(1, 2),
        "candidates": None,
    }
    return indexer.index_scores(CONFIG, INDEXED, **(given | changed))


def project(**changed: Any) -> torch.Tensor:
    tables = {"cos": fp32(3, 8), "sin": fp32(3, 8), "places": positions(1, 2)}
    given = {"o": bf16(1, 2, 4, 32), **tables, "weight": bf16(32, 64), "groups": 2}
    return output_projection.project_turned_back(**(given | changed))


WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "quantize-fp32": (lambda: quantize.quantize_fp8(fp32(2, 32)), TypeError, "x: expected bf16"),
    "quantize-scalar": (lambda: quantize.fake_quantize_fp8(bf16()), TypeError, "x: expected bf16 with at least one"),
    "quantize-odd-width": (lambda: quantize.quantize_fp4_e8m0(bf16(2, 33)), ValueError, "33 cannot be packed"),
    "dequantize-scale": (
        lambda: quantize.dequantize_fp8_weight(codes(64, 64), codes(2, 3)),
        ValueError,
        r"scale: expected shape \[2, 2\], got \[2, 3\]",
    ),
    "dequantize-dtype": (
        lambda: quantize.dequantize_fp4_weight(bf16(64, 16), codes(64, 1)),
        TypeError,
        "weight: expected torch.uint8",
    ),
    "linear-inputs": (
        lambda: linear.linear_fp8(bf16(2, 64), codes(32, 96), codes(1, 3)),
        ValueError,
        r"weight: expected \[N, 64\]",
    ),
    "linear-odd-inputs": (
        lambda: linear.linear_fp4(bf16(2, 33), codes(32, 16), codes(32, 1)),
        ValueError,
        r"weight: expected \[N, 16\] for x \[2, 33\]",
    ),
    "linear-weight-dtype": (
        lambda: linear.linear_fp8(bf16(2, 64), fp32(32, 64), codes(1, 2)),
        TypeError,
        "weight: expected torch.float8_e4m3fn",
    ),
    "linear-scale": (
        lambda: linear.linear_fp4(bf16(2, 64), codes(32, 32), codes(1, 2)),
        ValueError,
        r"scale: expected shape \[32, 2\]",
    ),
    "linear-fp16": (lambda: linear.linear_fp32(bf16(2, 64).half(), fp32(4, 64)), TypeError, "x: expected bf16 or fp32"),
    "norm-weight": (lambda: norm.rms_norm(bf16(2, 64), bf16(32), 1e-6), ValueError, r"weight: expected shape \[64\]"),
    "norm-width": (lambda: norm.rms_norm(bf16(1, 40_000), bf16(40_000), 1e-6), ValueError, "40000 is more than"),
    "norm-quantised-width": (
        lambda: norm.rms_norm_quantize_fp8(bf16(2, 48), bf16(48), 1e-6),
        ValueError,
        "48 is not a multiple of 32",
    ),
    "rotate-tables": (
        lambda: rotary.rotate(CONFIG, 0, bf16(1, 3, 32), positions(1, 2)),
        ValueError,
        r"x \[1, 3, 32\] does not go with tables",
    ),
    "rotate-format": (
        lambda: rotary.rotate(CONFIG, 0, bf16(1, 2, 32), positions(1, 2), form="fp6"),
        ValueError,
        "form: expected one of none, fp8",
    ),
    "coefficients-fn": (
        lambda: hyper_connections.hyper_connection_coefficients(
            CONFIG, bf16(1, 2, 4, 32), fp32(24, 64), fp32(3), fp32(24)
        ),
        ValueError,
        r"fn: expected shape \[24, 128\]",
    ),
    "read-gates": (
        lambda: hyper_connections.hyper_connection_read(bf16(1, 2, 4, 32), fp32(1, 2, 3)),
        ValueError,
        r"pre: expected shape \[1, 2, 4\]",
    ),
    "write-combination": (
        lambda: hyper_connections.hyper_connection_write(
            bf16(1, 2, 32), bf16(1, 2, 4, 32), fp32(1, 2, 4), fp32(1, 2, 4)
        ),
        ValueError,
        r"comb: expected shape \[1, 2, 4, 4\]",
    ),
    "attention-kv": (lambda: attend(kv=bf16(2, 8, 32)), ValueError, r"kv: expected \[1, N, 32\]"),
    "attention-indices": (lambda: attend(indices=ints(1, 3, 3)), ValueError, r"indices: expected int \[1, 2, n\]"),
    "attention-float-indices": (lambda: attend(indices=fp32(1, 2, 3)), ValueError, "indices: expected int"),
    "attention-sink": (lambda: attend(sink=fp32(3)), ValueError, r"sink: expected shape \[4\]"),
    "attention-splits": (lambda: attend(splits=0), ValueError, "splits: expected at least 1"),
    "attention-dtype": (lambda: attend(q=fp32(1, 2, 4, 32)), TypeError, "q: expected bf16"),
    "project-heads": (
        lambda: project(o=bf16(1, 2, 3, 32)),
        ValueError,
        r"o: expected \[B, T, H, d\] of 2 groups of heads, d even, got \[1, 2, 3, 32\]",
    ),
    "project-odd-heads": (lambda: project(o=bf16(1, 2, 4, 33)), ValueError, "d even"),
    "project-places": (lambda: project(places=positions(1, 3)), ValueError, r"places: expected shape \[1, 2\]"),
    "project-tables": (
        lambda: project(cos=fp32(3, 17), sin=fp32(3, 17)),
        ValueError,
        r"tables: \[3, 17\] and \[3, 17\] do not go with heads of 32",
    ),
    "project-weight": (
        lambda: project(weight=bf16(32, 128)),
        ValueError,
        r"weight: expected \[2 · N, 64\], got \[32, 128\]",
    ),
    "project-weight-dtype": (lambda: project(weight=fp32(32, 64)), TypeError, "weight: expected bf16"),
    "scores-weights": (lambda: score(head_weights=bf16(1, 2, 3)), ValueError, r"head_weights: expected shape"),
    "scores-keys": (lambda: score(keys=bf16(1, 8, 16)), ValueError, r"keys: expected shape \[1, 8, 32\]"),
    "scores-candidates": (
        lambda: score(candidates=torch.ones(1, 2, 7, dtype=torch.bool, device=DEVICE)),
        ValueError,
        r"candidates: expected shape \[1, 2, 8\]",
    ),
    "select-dtype": (
        lambda: selection.best_positions(fp32(1, 2, 8), 2, positions(1, 2)),
        TypeError,
        "scores: expected bf16",
    ),
    "select-less-than-nothing": (
        lambda: selection.best_positions(bf16(1, 2, 8), -1, positions(1, 2)),
        ValueError,
        "wanted: expected 0 or more, got -1",
    ),
    "select-part-of-a-block": (
        lambda: selection.best_positions(bf16(1, 2, 8), 2, positions(1, 2), listed=selection.Listed(ints(1, 2, 2), 3)),
        ValueError,
        "scores: 8 are no whole blocks of 3",
    ),
    "select-into-a-copy": (
        lambda: selection.best_positions(bf16(1, 2, 8), 2, positions(1, 2), out=ints(1, 2, 4)[..., ::2]),
        ValueError,
        "out: not contiguous",
    ),
    "candidates-positions": (
        lambda: candidates.candidate_mask(CONFIG, INDEXED, bf16(1, 2, 8), positions(1, 3)),
        ValueError,
        r"positions: expected shape \[1, 2\]",
    ),
    "gate-bias": (
        lambda: gate.gate(CONFIG, {"weight": fp32(8, 32), "bias": fp32(7)}, bf16(2, 32), None),
        ValueError,
        r"bias: expected shape \[8\], got \[7\]",
    ),
    "no-expert": (lambda: expert_stack.routed_stack(CONFIG, {}), ValueError, "the weights hold no expert"),
    "engram-layer": (
        lambda: engram.engram_hash(CONFIG, 99, ints(8), ints(1, 2), None),
        ValueError,
        "layer 99 has no Engram",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_belong_together_are_refused_in_one_line(name: str) -> None:
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


EMPTY: dict[str, tuple[Callable[[], torch.Tensor], tuple[int, ...]]] = {
    "quantize": (lambda: quantize.fake_quantize_fp4_e4m3(bf16(0, 32)), (0, 32)),
    "linear": (lambda: linear.linear_fp8(bf16(0, 64), codes(32, 64), codes(1, 2)), (0, 32)),
    "linear-bf16": (lambda: linear.linear_bf16(bf16(2, 0, 64), bf16(8, 64)), (2, 0, 8)),
    "norm": (lambda: norm.rms_norm(bf16(0, 32), bf16(32), 1e-6), (0, 32)),
    "rotate": (lambda: rotary.rotate(CONFIG, 0, bf16(0, 2, 32), positions(0, 2)), (0, 2, 32)),
    "read": (lambda: hyper_connections.hyper_connection_read(bf16(0, 2, 4, 32), fp32(0, 2, 4)), (0, 2, 32)),
    "attention": (
        lambda: attend(q=bf16(0, 2, 4, 32), kv=bf16(0, 8, 32), indices=ints(0, 2, 3)),
        (0, 2, 4, 32),
    ),
    "project": (lambda: project(o=bf16(0, 2, 4, 32), places=positions(0, 2)), (0, 2, 32)),
    "scores": (lambda: score(keys=bf16(1, 0, 32)), (1, 2, 0)),
    "select": (lambda: selection.best_positions(bf16(1, 2, 0), 0, positions(1, 2)), (1, 2, 0)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_in_nothing_out(name: str) -> None:
    call, shape = EMPTY[name]
    assert tuple(call().shape) == shape


def test_an_empty_list_attends_to_nothing() -> None:
    assert torch.equal(attend(indices=ints(1, 2, 0)), torch.zeros(1, 2, 4, 32, dtype=torch.bfloat16, device=DEVICE))


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same values, every second element of a wider tensor."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    return wide[..., ::2]


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16().to(DEVICE)


def test_strides_do_not_change_results() -> None:
    x, weight = random(3, 64), random(16, 64)
    assert torch.equal(linear.linear_bf16(spread(x), spread(weight)), linear.linear_bf16(x, weight))
    assert torch.equal(norm.rms_norm(spread(x), spread(weight[0]), 1e-6), norm.rms_norm(x, weight[0], 1e-6))
    assert torch.equal(quantize.fake_quantize_fp8(spread(x)), quantize.fake_quantize_fp8(x))
    q, kv = random(1, 2, 4, 32), random(1, 8, 32)
    assert torch.equal(attend(q=spread(q), kv=spread(kv)), attend(q=q, kv=kv))
