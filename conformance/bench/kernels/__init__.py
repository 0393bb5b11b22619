"""The kernels that can be benchmarked, by name: each makes a problem of its sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from conformance.bench.kernels import attending, elementwise, hashing, linears, mixture, streams
from conformance.bench.problem import Problem, Sizes

Maker = Callable[[Sizes], Problem]

KERNELS: Mapping[str, Maker] = {
    "quantize_fp8": elementwise.quantize_fp8,
    "quantize_fp4_e8m0": elementwise.quantize_fp4_e8m0,
    "quantize_fp4_e4m3": elementwise.quantize_fp4_e4m3,
    "rms_norm": elementwise.rms_norm,
    "norm_quantize": elementwise.norm_quantize,
    "compressed_rows": elementwise.compressed_rows,
    "hyper_connection_read": streams.hyper_connection_read,
    "hyper_connection_coefficients": streams.hyper_connection_coefficients,
    "hyper_connection_write": streams.hyper_connection_write,
    "linear_fp8": linears.linear_fp8,
    "linear_fp4": linears.linear_fp4,
    "linear_bf16": linears.linear_bf16,
    "linear_fp32": linears.linear_fp32,
    "experts": mixture.experts,
    "sparse_attention": attending.sparse_attention,
    "index_select": attending.index_select,
    "gate": mixture.gate,
    "engram_hash": hashing.engram_hash,
}
