"""Which of SGLang's modules are executed; everything else in it is left out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

# Before anything imports Triton, as SGLang's modules do.
import conformance.adapters.interpreted_triton  # noqa: F401
from conformance.ports.partial import Parts

KERNELS = "sglang.kernels.ops"
QUANTIZATION = f"{KERNELS}.quantization"
SPARSE = f"{KERNELS}.attention.dsv4"
LAYERS = "sglang.srt.layers"
INDEXER = f"{LAYERS}.attention.dsv4.v41_indexer.scoring"


def _no(*arguments: Any, **options: Any) -> bool:
    return False


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


ANSWERS: Mapping[str, Any] = MappingProxyType(
    {
        "sglang.srt.utils.is_cuda": _no,
        "sglang.srt.utils.is_hip": _no,
        "sglang.srt.utils.is_gfx95_supported": _no,
        "sglang.kernels.jit.utils.cache_once": functools.cache,
        "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph.eager_on_graph": (
            _as_it_is
        ),
        "sglang.kernels.ops.gemm.small_gemm_bf16.can_use_n128k512_gemm": _no,
    }
)
"""No GPU of any kind; decorators that only matter where there is one do nothing."""

SGLANG = Parts(
    "sglang",
    (
        "sglang.srt.environ",
        f"{QUANTIZATION}.fp4_fake_quant",
        f"{QUANTIZATION}.fp4_indexer_quant",
        f"{QUANTIZATION}.mxfp8_amd_gfx95",
        f"{SPARSE}.candidate_blocks",
        f"{SPARSE}.fp4_rope_fake_quant",
        f"{SPARSE}.rope",
        f"{KERNELS}.embeddings.engram_gate",
        f"{KERNELS}.embeddings.engram_gather",
        f"{KERNELS}.embeddings.engram_hash",
        f"{KERNELS}.gemm.bf16_fp32",
        f"{KERNELS}.gemm.mxfp8_amd_gfx95",
        f"{KERNELS}.layernorm.mhc",
        f"{LAYERS}.attention.dsv4.dsv41_sparse",
        INDEXER,
        f"{LAYERS}.engram",
        "sglang.srt.models.deepseek_v41_vit",
        "sglang.srt.multimodal.deepseek_v41_image_processing",
        "sglang.test.kernels.mhc",
        "sglang.test.kernels.deepseek_v4.dsv41_kv_quant_reference",
    ),
    ANSWERS,
)
