"""Which of vLLM's modules are executed; everything else in it is left out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

# Before anything imports Triton.
import conformance.adapters.interpreted_triton  # noqa: F401
from conformance.ports.partial import Parts

# isort: split
import triton
import triton.language as tl

COMMON = "vllm.models.deepseek_v41.common"
MHC = "vllm.model_executor.kernels.mhc"
ROTARY = "vllm.model_executor.layers.rotary_embedding"
MXFP8 = "vllm.model_executor.layers.quantization.utils.mxfp8_utils"
LINEAR = "vllm.model_executor.kernels.linear.mxfp8.emulation"


def _no(*arguments: Any, **options: Any) -> bool:
    return False


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class _NoPlatform:
    """A platform that is none of those that vLLM asks about."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return _no


class _Operation(torch.nn.Module):
    """A base of layers that have several forms; here the torch form is called."""

    def __init__(self, **options: bool) -> None:
        super().__init__()

    @staticmethod
    def register(name: str) -> Callable[..., Any]:
        """Names are not kept."""
        return _as_it_is

    enabled = staticmethod(_no)


ANSWERS: Mapping[str, Any] = MappingProxyType(
    {
        "vllm.triton_utils.triton": triton,
        "vllm.triton_utils.tl": tl,
        "vllm.logger.init_logger": logging.getLogger,
        "vllm.platforms.current_platform": _NoPlatform(),
        "vllm.compilation.breakable_cudagraph.eager_break_during_capture": _as_it_is,
        "vllm.utils.torch_utils.direct_register_custom_op": _nothing,
        "vllm.model_executor.custom_op.CustomOp": _Operation,
    }
)
"""No GPU of any kind; registrations and decorators that only matter in the engine do nothing."""

VLLM = Parts(
    "vllm",
    (
        f"{COMMON}.engram",
        f"{COMMON}.ops.fused_compress_quant_cache",
        f"{MHC}.torch",
        f"{MHC}.triton",
        f"{ROTARY}.base",
        f"{ROTARY}.common",
        f"{ROTARY}.deepseek_scaling_rope",
        MXFP8,
        LINEAR,
    ),
    ANSWERS,
)
