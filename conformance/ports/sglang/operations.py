"""Quantisers, linears, the norm, rotary embedding and hyper-connections: one function of SGLang's each."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from conformance.interface import Array, Config, Implementation, Unsupported
from conformance.ports.sglang.parts import KERNELS, LAYERS, QUANTIZATION, SGLANG, SPARSE
from conformance.ports.watching import Watched, replaced, seen, stop

GROUP = 32
TILE = 32
"""Side of the squares of an FP8 weight that share a scale."""
CACHED_ROW = 512
"""Features of a row in the KV cache: the formats of the cache exist for this width only."""
INDEX_ROW = 128
"""Features of an index key, likewise."""
ROWS_IN_A_PROGRAM = 512


class Operations(Implementation):
    """What needs no more than its arguments."""

    # quantize -------------------------------------------------------------------------------------------------------

    def quantize_fp8(self, x: Array) -> tuple[Array, Array]:
        """What inputs of FP8 linears go through: the kernel that says it follows the CUDA quantiser's rule."""
        quantize = SGLANG.function(f"{QUANTIZATION}.mxfp8_amd_gfx95", "fp8_grid_quantize")
        codes, scales = quantize(_grouped(x).reshape(-1, x.shape[-1]))
        return codes.reshape(x.shape), scales.view(torch.float8_e8m0fnu).reshape(*x.shape[:-1], -1)

    def quantize_fp4_e8m0(self, x: Array) -> tuple[Array, Array]:
        """Index keys and queries, as they are packed for scoring."""
        quantize = SGLANG.function(f"{QUANTIZATION}.fp4_indexer_quant", "_quantize_fp4_indexer_rows")
        rows, count = _rows(_grouped(x), INDEX_ROW)
        codes = torch.empty(len(rows), INDEX_ROW // 2, dtype=torch.int8)
        scales = torch.empty(len(rows), dtype=torch.int32)
        # Rows are independent: interpreted, many in a program are quicker.
        block = min(ROWS_IN_A_PROGRAM, 1 << (len(rows) - 1).bit_length())
        programs = -(-len(rows) // block)
        quantize[(programs,)](rows, codes, scales, len(rows), block, BLOCK_N=INDEX_ROW, GROUP_N=GROUP, RNE=True)
        packed = codes.view(torch.uint8).reshape(-1)[: count // 2]
        exponents = scales.view(torch.uint8).reshape(-1)[: count // GROUP]
        return packed.reshape(*x.shape[:-1], -1), exponents.view(torch.float8_e8m0fnu).reshape(*x.shape[:-1], -1)

    def quantize_fp4_e4m3(self, x: Array) -> tuple[Array, Array]:
        """Compressed rows, by the description of the cache that SGLang's tests compare its kernels with."""
        quantize = SGLANG.function(_CACHE, "quantize_k_cache_v41_fp4")
        rows, count = _rows(x, CACHED_ROW)
        pages = quantize(rows[:, None])
        packed = pages[:, : CACHED_ROW // 2].reshape(-1)[: count // 2]
        scales = pages[:, CACHED_ROW // 2 :][:, : CACHED_ROW // 16].reshape(-1)[: count // 16]
        return packed.reshape(*x.shape[:-1], -1), scales.view(torch.float8_e4m3fn).reshape(*x.shape[:-1], -1)

    def fake_quantize_fp8(self, x: Array) -> Array:
        """A window's rows into the cache and back, by the same description."""
        quantize = SGLANG.function(_CACHE, "quantize_k_cache_v41")
        dequantize = SGLANG.function(_CACHE, "dequantize_k_cache_v41")
        rows, count = _rows(x, CACHED_ROW)
        return dequantize(quantize(rows[:, None]), 1).reshape(-1)[:count].reshape(x.shape)

    def fake_quantize_fp4_e8m0(self, x: Array) -> Array:
        """The indexer's."""
        result: Array = SGLANG.function(f"{QUANTIZATION}.fp4_fake_quant", "fake_quant_fp4")(_grouped(x))
        return result

    def fake_quantize_fp4_e4m3(self, x: Array) -> Array:
        """The compressed rows'."""
        result: Array = SGLANG.function(f"{QUANTIZATION}.fp4_fake_quant", "fake_quant_compressed_kv")(x)
        return result

    def dequantize_fp8_weight(self, weight: Array, scale: Array) -> Array:
        """What the linears with dequantised weights are given."""
        dequantize = SGLANG.function(f"{QUANTIZATION}.mxfp8_amd_gfx95", "dequant_block_fp8_weight_to_bf16")
        result: Array = dequantize(weight, scale, (TILE, TILE))
        return result

    # linear, norm ---------------------------------------------------------------------------------------------------

    def linear_fp8(self, x: Array, weight: Array, scale: Array) -> Array:
        """The linear with dequantised weights; it quantises its input itself."""
        linear = SGLANG.function(f"{KERNELS}.gemm.mxfp8_amd_gfx95", "bf16_dequant_blockscaled_linear")
        result: Array = linear(_grouped(x), self.dequantize_fp8_weight(weight, scale))
        return result

    def linear_fp32(self, x: Array, weight: Array) -> Array:
        """The compressor's projections."""
        linear = SGLANG.function(f"{KERNELS}.gemm.bf16_fp32", "linear_bf16_fp32")
        result: Array = linear(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)
        return result

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """The norm of the compressors and indexers."""
        result: Array = norm(weight, eps)(x)
        return result

    # rotary ---------------------------------------------------------------------------------------------------------

    def rotary_frequencies(self, config: Config, layer_id: int) -> Array:
        """What its table is the outer product of."""
        module = SGLANG.module(f"{SPARSE}.rope")
        with replaced(module, torch=Watched(torch, outer=lambda positions, frequencies: stop(frequencies))):
            make = inspect.unwrap(module.precompute_freqs_cis)
            result: Array = seen(lambda: make(**rope(config, layer_id, 1)))
        return result

    def rotary_tables(self, config: Config, layer_id: int, positions: Array) -> tuple[Array, Array]:
        """Real and imaginary part of its table."""
        turns = table(config, layer_id, positions)
        return turns.real.contiguous(), turns.imag.contiguous()

    def rotate(self, config: Config, layer_id: int, x: Array, positions: Array, inverse: bool) -> Array:
        """The torch form."""
        turn = SGLANG.function(f"{LAYERS}.attention.dsv4.dsv41_sparse", "rope_tail")
        tokens = x.reshape(-1, *x.shape[2:])
        turns = table(config, layer_id, positions.reshape(-1))
        result: Array = turn(tokens, turns, config["rope_head_dim"], inverse).reshape(x.shape)
        return result

    # hyper_connections ----------------------------------------------------------------------------------------------

    def hyper_connection_coefficients(
        self, config: Config, h: Array, fn: Array, scale: Array, base: Array
    ) -> tuple[Array, Array, Array]:
        """The batch-invariant projection, a Triton kernel, and the torch form of the Sinkhorn rounds.

        The rounds have a kernel too, one program a token; interpreted, it would take minutes for a trace.
        """
        mix = SGLANG.function(f"{KERNELS}.layernorm.mhc", "hc_mix_stats")
        split = SGLANG.function("sglang.test.kernels.mhc", "hc_split_sinkhorn_torch")
        streams = h.shape[-2]
        if (streams * h.shape[-1]) % 64:
            raise Unsupported("sglang: streams times width is a multiple of 64")
        flat = h.reshape(-1, streams * h.shape[-1]).contiguous()
        mixes = mix(flat, fn, config["norm_eps"])
        pre, post, comb = split(mixes[None], scale, base, streams, config["hc_sinkhorn_iters"], config["hc_eps"])
        lead = h.shape[:-2]
        return pre.reshape(*lead, -1), post.reshape(*lead, -1), comb.reshape(*lead, streams, streams)

    def hyper_connection_read(self, h: Array, pre: Array) -> Array:
        """A Triton kernel."""
        combine = SGLANG.function(f"{KERNELS}.layernorm.mhc", "mhc_combine")
        streams, width = h.shape[-2:]
        out = combine(h.reshape(-1, streams * width), pre.reshape(-1, streams), streams, h.dtype)
        result: Array = out.reshape(*h.shape[:-2], width)
        return result

    def hyper_connection_write(self, y: Array, h: Array, post: Array, comb: Array) -> Array:
        """The torch form."""
        write = SGLANG.function(f"{KERNELS}.layernorm.mhc", "_mhc_post_torch")
        streams, width = h.shape[-2:]
        out = write(
            y.reshape(-1, width),
            h.reshape(-1, streams, width),
            post.reshape(-1, streams, 1),
            comb.reshape(-1, streams, streams),
        )
        result: Array = out.reshape(h.shape)
        return result


_CACHE = "sglang.test.kernels.deepseek_v4.dsv41_kv_quant_reference"


def norm(weight: torch.Tensor, eps: float) -> Any:
    """The norm with a weight."""
    module = SGLANG.function(f"{LAYERS}.attention.dsv4.dsv41_sparse", "RMSNorm")(weight.shape[-1], eps)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def rope(config: Config, layer_id: int, length: int) -> dict[str, Any]:
    """How SGLang asks for a layer's table of `length` positions: no scaling without compression."""
    compressed = bool(config["compress_ratios"][layer_id])
    return {
        "dim": config["rope_head_dim"],
        "seqlen": length,
        "original_seq_len": config["original_seq_len"] if compressed else 0,
        "base": config["compress_rope_theta"] if compressed else config["rope_theta"],
        "factor": config["rope_factor"],
        "beta_fast": config["beta_fast"],
        "beta_slow": config["beta_slow"],
    }


def table(config: Config, layer_id: int, positions: torch.Tensor) -> torch.Tensor:
    """complex64 [P, rope_head_dim / 2] at int64 positions [P]."""
    make = SGLANG.function(f"{SPARSE}.rope", "precompute_freqs_cis")
    turns: torch.Tensor = make(**rope(config, layer_id, int(positions.max()) + 1))[positions]
    return turns


def _grouped(x: torch.Tensor) -> torch.Tensor:
    if x.shape[-1] % GROUP:
        raise Unsupported(f"sglang: widths that are no multiple of {GROUP}")
    return x.contiguous()


def _rows(x: torch.Tensor, width: int) -> tuple[torch.Tensor, int]:
    """The elements as rows of the width that a format exists for, zeros behind the last; and how many they are.

    A quantiser's groups lie one behind another along the last axis, so that they may be put into other rows.
    """
    flat = x.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % width)).reshape(-1, width), len(flat)
