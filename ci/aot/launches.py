"""Every launcher of `optimized/` at the released sizes, on tensors without data.

A plan names a call; running it shows which kernels it would launch, with which types and compile-time constants.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources

from optimized.device import DEVICE

# ruff: isort: split
import torch

from optimized import (
    attention,
    candidates,
    engram,
    experts,
    gate,
    hyper_connections,
    indexer,
    linear,
    norm,
    quantize,
    rotary,
    scoring,
    selection,
    sparse_attention,
)
from optimized.config import Config
from optimized.rows import index_key_format
from optimized.selection import Listed

SMALL = os.environ.get("LAUNCH_SIZES") == "small"
"""Set by `traffic.py`, which interprets the launches: then sizes are nearly those of the golden set `tiny`."""
SMALL_SIZES = {"dim": 512, "window_size": 64, "index_topk": 128}
"""Where the golden set's would not make several programs share a sum."""
PREFILL, DECODE, BATCH = (18, 1, 3) if SMALL else (4096, 1, 64)
"""Tokens of a prefill, of one request's decode step, and of a batch of requests."""
CONTEXT = 144 if SMALL else 65_536
DEEP_CONTEXT = 200 if SMALL else 1_048_576
LAYER = 6 if SMALL else 20
"""A layer with ratio 1: what its kernels see differs from the others' in lengths only."""


def launched_config() -> Config:
    """The configuration that is published, or the small one."""
    if SMALL:
        tiny = json.loads(resources.files("fixtures").joinpath("tiny/config.json").read_text())
        return Config.from_mapping({**tiny, **SMALL_SIZES})
    return Config.from_mapping(json.loads(resources.files("conformance.configs").joinpath("released.json").read_text()))


CONFIG = launched_config()


def bf16(*shape: int) -> torch.Tensor:
    """A bf16 tensor without data."""
    return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)


def fp32(*shape: int) -> torch.Tensor:
    """An fp32 tensor without data."""
    return torch.empty(shape, dtype=torch.float32, device=DEVICE)


def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """An integer tensor without data."""
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def mask(*shape: int) -> torch.Tensor:
    """A boolean tensor without data."""
    return torch.empty(shape, dtype=torch.bool, device=DEVICE)


def fp8_weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes and E8M0 scales of 32x32 tiles."""
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=DEVICE)
    return codes, torch.empty(-(-rows // 32), -(-columns // 32), dtype=torch.float8_e8m0fnu, device=DEVICE)


def fp4_weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed E2M1 codes and E8M0 scales of rows' groups."""
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=DEVICE)
    return codes, torch.empty(rows, columns // 32, dtype=torch.float8_e8m0fnu, device=DEVICE)


@dataclass(frozen=True)
class Plan:
    """One call of a launcher."""

    name: str
    call: Callable[[], object]


def _expert_weights(
    prefix: str, kind: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    found = {}
    for matrix, rows, columns in (
        ("w1", CONFIG.moe_inter_dim, CONFIG.dim),
        ("w2", CONFIG.dim, CONFIG.moe_inter_dim),
        ("w3", CONFIG.moe_inter_dim, CONFIG.dim),
    ):
        found[f"{prefix}{matrix}.weight"], found[f"{prefix}{matrix}.scale"] = kind(rows, columns)
    return found


def _mixture_weights() -> dict[str, torch.Tensor]:
    weights = _expert_weights("shared_experts.", fp8_weight)
    for number in range(CONFIG.n_routed_experts):
        weights |= _expert_weights(f"experts.{number}.", fp4_weight)
    return weights


def _gate_weights() -> dict[str, torch.Tensor]:
    experts_ = CONFIG.n_routed_experts
    return {"weight": fp32(experts_, CONFIG.dim), "bias": fp32(experts_), "bias_vl": fp32(experts_)}


def _engram_weights() -> dict[str, torch.Tensor]:
    width, dim, streams = CONFIG.engram_head_dim, CONFIG.dim, CONFIG.hc_mult
    columns = (CONFIG.engram_max_ngram_size - 1) * CONFIG.engram_n_heads
    rows = CONFIG.engram_num_embeddings[0]
    wkv, wkv_scale = fp8_weight((streams + 1) * dim, columns * width)
    return {
        "embed.weight": torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=DEVICE),
        "embed.scale": torch.empty(rows, width // 32, dtype=torch.float8_e8m0fnu, device=DEVICE),
        "wkv.weight": wkv,
        "wkv.scale": wkv_scale,
        "q_weight": fp32(streams, dim),
        "k_weight": fp32(streams, dim),
    }


def _attention_weights() -> dict[str, torch.Tensor]:
    group_width = CONFIG.n_heads * CONFIG.head_dim // CONFIG.o_groups
    wo_b, wo_b_scale = fp8_weight(CONFIG.dim, CONFIG.o_groups * CONFIG.o_lora_rank)
    return {
        "wo_a.weight": bf16(CONFIG.o_groups * CONFIG.o_lora_rank, group_width),
        "wo_b.weight": wo_b,
        "wo_b.scale": wo_b_scale,
    }


def _packed_scores(tokens: int, context: int, listed: bool) -> object:
    """Each token a request of its own, which sees all of its context."""
    form, heads = index_key_format(CONFIG), CONFIG.index_n_heads
    seen = torch.full((tokens,), context, dtype=torch.int64, device=DEVICE)
    asked = scoring.Asked(bf16(tokens, heads, CONFIG.index_head_dim), bf16(tokens, heads), seen, 1)
    keys = torch.empty(tokens, context, form.bytes, dtype=torch.uint8, device=DEVICE)
    slots = torch.arange(tokens, device=DEVICE)
    return list(scoring.packed_scores(asked, form, keys, slots, _listed(tokens) if listed else None))


def _listed(tokens: int) -> Listed:
    blocks = torch.arange(CONFIG.candidate_topk_blocks, dtype=torch.int32, device=DEVICE).expand(tokens, -1)
    return Listed(blocks.contiguous(), CONFIG.candidate_block_size)


def _select_listed(tokens: int) -> object:
    listed = _listed(tokens)
    places = listed.blocks.shape[1] * listed.size
    seen = torch.full((tokens,), places, dtype=torch.int64, device=DEVICE)
    return selection.best_positions(bf16(tokens, places), CONFIG.index_topk, seen, seen, listed)


def _linears(tokens: int) -> list[Plan]:
    dim, inner = CONFIG.dim, CONFIG.moe_inter_dim
    heads = CONFIG.n_heads * CONFIG.head_dim
    return [
        Plan(
            f"linear_fp8/{tokens}",
            lambda: linear.linear_fp8(bf16(tokens, CONFIG.q_lora_rank), *fp8_weight(heads, CONFIG.q_lora_rank)),
        ),
        Plan(f"linear_fp4/{tokens}", lambda: linear.linear_fp4(bf16(tokens, dim), *fp4_weight(inner, dim))),
        Plan(
            f"linear_bf16/{tokens}",
            lambda: linear.linear_bf16(bf16(tokens, CONFIG.head_dim), bf16(128, CONFIG.head_dim)),
        ),
        Plan(
            f"linear_fp32/{tokens}", lambda: linear.linear_fp32(bf16(tokens, dim), fp32(CONFIG.n_routed_experts, dim))
        ),
    ]


def _by_tokens(tokens: int) -> list[Plan]:
    dim, streams, heads, width = CONFIG.dim, CONFIG.hc_mult, CONFIG.n_heads, CONFIG.head_dim
    mixes = (2 + streams) * streams
    h = (1, tokens, streams, dim)
    positions = integers(1, tokens, dtype=torch.int64)
    context = CONTEXT if tokens > 1 else DEEP_CONTEXT
    listed = CONFIG.window_size + CONFIG.index_topk
    return [
        *_linears(tokens),
        Plan(f"rms_norm/{tokens}", lambda: norm.rms_norm(bf16(tokens, dim), bf16(dim), 1e-6)),
        Plan(f"rms_norm_quantize_fp8/{tokens}", lambda: norm.rms_norm_quantize_fp8(bf16(tokens, dim), bf16(dim), 1e-6)),
        Plan(
            f"rotate/queries/{tokens}", lambda: rotary.rotate(CONFIG, LAYER, bf16(1, tokens, heads, width), positions)
        ),
        Plan(
            f"rotate/window/{tokens}",
            lambda: rotary.rotate(CONFIG, LAYER, bf16(1, tokens, width), positions, form="fp8"),
        ),
        Plan(
            f"rotate/compressed/{tokens}",
            lambda: rotary.rotate(CONFIG, LAYER, bf16(1, tokens, width), positions, form="fp4_e4m3"),
        ),
        Plan(
            f"rotate/index-keys/{tokens}",
            lambda: rotary.rotate(CONFIG, LAYER, bf16(1, tokens, CONFIG.index_head_dim), positions, form="fp4_e8m0"),
        ),
        Plan(
            f"hyper_connection_coefficients/{tokens}",
            lambda: hyper_connections.hyper_connection_coefficients(
                CONFIG, bf16(*h), fp32(mixes, streams * dim), fp32(3), fp32(mixes)
            ),
        ),
        Plan(
            f"hyper_connection_read/{tokens}", lambda: hyper_connections.hyper_connection_read(bf16(*h), fp32(*h[:3]))
        ),
        Plan(
            f"hyper_connection_read/normed/{tokens}",
            lambda: hyper_connections.hyper_connection_read(bf16(*h), fp32(*h[:3]), bf16(dim), 1e-6),
        ),
        Plan(
            f"hyper_connection_write/{tokens}",
            lambda: hyper_connections.hyper_connection_write(
                bf16(1, tokens, dim), bf16(*h), fp32(*h[:3]), fp32(*h[:3], streams)
            ),
        ),
        Plan(
            f"sparse_attention/{tokens}",
            lambda: sparse_attention.sparse_attention(
                bf16(1, tokens, heads, width),
                bf16(1, context, width),
                integers(1, tokens, listed),
                fp32(heads),
                width**-0.5,
            ),
        ),
        Plan(
            f"index_scores/{tokens}",
            lambda: indexer.index_scores(
                CONFIG,
                LAYER,
                bf16(1, tokens, CONFIG.index_n_heads, CONFIG.index_head_dim),
                bf16(1, tokens, CONFIG.index_n_heads),
                bf16(1, context, CONFIG.index_head_dim),
                positions,
                None,
            ),
        ),
        Plan(
            f"index_scores/candidates/{tokens}",
            lambda: indexer.index_scores(
                CONFIG,
                LAYER,
                bf16(1, tokens, CONFIG.index_n_heads, CONFIG.index_head_dim),
                bf16(1, tokens, CONFIG.index_n_heads),
                bf16(1, context, CONFIG.index_head_dim),
                positions,
                mask(1, tokens, context),
            ),
        ),
        Plan(
            f"select_positions/{tokens}",
            lambda: indexer.select_positions(CONFIG, LAYER, bf16(1, tokens, context), positions),
        ),
        Plan(f"packed_scores/{tokens}", partial(_packed_scores, tokens, context, False)),
        Plan(f"packed_scores/candidates/{tokens}", partial(_packed_scores, tokens, context, True)),
        Plan(f"best_positions/candidates/{tokens}", partial(_select_listed, tokens)),
        Plan(
            f"candidate_mask/{tokens}",
            lambda: candidates.candidate_mask(CONFIG, LAYER, bf16(1, tokens, context), positions),
        ),
        Plan(
            f"attention_output/{tokens}",
            lambda: attention.attention_output(
                CONFIG, LAYER, _attention_weights(), bf16(1, tokens, heads, width), positions
            ),
        ),
        Plan(f"gate/{tokens}", lambda: gate.gate(CONFIG, _gate_weights(), bf16(tokens, dim), None)),
        Plan(f"gate/images/{tokens}", lambda: gate.gate(CONFIG, _gate_weights(), bf16(tokens, dim), mask(tokens))),
        Plan(
            f"experts/{tokens}",
            lambda: experts.experts(
                CONFIG,
                _mixture_weights(),
                bf16(tokens, dim),
                fp32(tokens, CONFIG.n_activated_experts),
                integers(tokens, CONFIG.n_activated_experts),
            ),
        ),
        Plan(
            f"engram_hash/{tokens}",
            lambda: engram.engram_hash(
                CONFIG, CONFIG.engram_layer_ids[0], integers(CONFIG.vocab_size), integers(1, tokens), None
            ),
        ),
        Plan(
            f"engram_write/{tokens}",
            lambda: engram.engram_write(
                CONFIG,
                CONFIG.engram_layer_ids[0],
                _engram_weights(),
                bf16(*h),
                integers(1, tokens, (CONFIG.engram_max_ngram_size - 1) * CONFIG.engram_n_heads, dtype=torch.int64),
                None,
            ),
        ),
        Plan(
            f"engram_write/images/{tokens}",
            lambda: engram.engram_write(
                CONFIG,
                CONFIG.engram_layer_ids[0],
                _engram_weights(),
                bf16(*h),
                integers(1, tokens, (CONFIG.engram_max_ngram_size - 1) * CONFIG.engram_n_heads, dtype=torch.int64),
                mask(1, tokens),
            ),
        ),
    ]


def _quantised(name: str) -> object:
    return getattr(quantize, name)(bf16(PREFILL, CONFIG.dim))


def _quantisers() -> list[Plan]:
    dim = CONFIG.dim
    return [
        *(
            Plan(name, partial(_quantised, name))
            for name in (
                "quantize_fp8",
                "quantize_fp4_e8m0",
                "quantize_fp4_e4m3",
                "fake_quantize_fp8",
                "fake_quantize_fp4_e8m0",
                "fake_quantize_fp4_e4m3",
            )
        ),
        Plan("dequantize_fp8_weight", lambda: quantize.dequantize_fp8_weight(*fp8_weight(dim, dim))),
        Plan("dequantize_fp4_weight", lambda: quantize.dequantize_fp4_weight(*fp4_weight(dim, dim))),
    ]


PLANS: tuple[Plan, ...] = (*_quantisers(), *_by_tokens(PREFILL), *_by_tokens(BATCH), *_by_tokens(DECODE))
