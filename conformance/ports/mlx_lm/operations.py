"""Operations of mlx-lm that need no weights of a model: single functions and layers of mlx and of its model file."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar, Literal

import torch

from conformance.interface import Array, Config, Implementation, Unsupported
from conformance.ports.mlx_lm.arrays import mx, nn, to_mlx, to_torch
from conformance.ports.mlx_lm.loading import D, arguments

switch_layers: Any = importlib.import_module("mlx_lm.models.switch_layers")
make_sampler: Any = importlib.import_module("mlx_lm.sample_utils").make_sampler

GROUP = 32
FP8 = {"group_size": GROUP, "bits": 8, "mode": "mxfp8"}
FP4 = {"group_size": GROUP, "bits": 4, "mode": "mxfp4"}


class Operations(Implementation):
    """The stateless part of the adapter."""

    tensor_type: ClassVar[Literal["torch", "numpy"]] = "torch"

    # quantize -------------------------------------------------------------------------------------------------------

    def fake_quantize_fp8(self, x: Array) -> Array:
        """Q8 and back."""
        return to_torch(D._fake_quant_fp8(to_mlx(_grouped(x, 32)), 32))

    def fake_quantize_fp4_e8m0(self, x: Array) -> Array:
        """Q4-E8M0 and back."""
        return to_torch(D._fake_quant_fp4(to_mlx(_grouped(x, 32)), block_size=32))

    def fake_quantize_fp4_e4m3(self, x: Array) -> Array:
        """Q4-E4M3 and back."""
        return to_torch(D._fake_quant_fp4(to_mlx(_grouped(x, 16)), block_size=16, e4m3_scale=True))

    def dequantize_fp8_weight(self, weight: Array, scale: Array) -> Array:
        """The loader's repacking, then mlx's own dequantiser."""
        return to_torch(mx.dequantize(*D._repack(to_mlx(_grouped(weight, GROUP)), to_mlx(scale)), **FP8))

    def dequantize_fp4_weight(self, weight: Array, scale: Array) -> Array:
        """The loader's repacking, then mlx's own dequantiser."""
        return to_torch(mx.dequantize(*D._repack(to_mlx(_grouped(weight, GROUP // 2)), to_mlx(scale)), **FP4))

    # linear, norm ---------------------------------------------------------------------------------------------------

    def linear_fp8(self, x: Array, weight: Array, scale: Array) -> Array:
        """A quantised layer of the attention; its input is not quantised."""
        layer = nn.QuantizedLinear(GROUP, GROUP, bias=False, **FP8)
        layer.weight, layer.scales = D._repack(to_mlx(_grouped(weight, GROUP)), to_mlx(scale))
        return to_torch(layer(to_mlx(x)))

    def linear_fp4(self, x: Array, weight: Array, scale: Array) -> Array:
        """A quantised layer of the experts, with one expert; its input is not quantised."""
        layer = switch_layers.SwitchLinear(GROUP, GROUP, 1, bias=False).to_quantized(**FP4)
        packed, scales = D._repack(to_mlx(_grouped(weight, GROUP // 2)), to_mlx(scale))
        layer.weight, layer.scales = packed[None], scales[None]
        tokens = to_mlx(x.reshape(-1, 1, 1, x.shape[-1]))
        out = layer(tokens, mx.zeros((tokens.shape[0], 1), mx.int32))
        return to_torch(out).reshape(*x.shape[:-1], weight.shape[0])

    def linear_bf16(self, x: Array, weight: Array) -> Array:
        """An ordinary layer."""
        return to_torch(_linear(to_mlx(x), to_mlx(weight)))

    def linear_fp32(self, x: Array, weight: Array) -> Array:
        """As the compressor of ratio 2 and the router do."""
        return to_torch(_linear(to_mlx(x).astype(mx.float32), to_mlx(weight).astype(mx.float32)))

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """mlx's RMSNorm layer."""
        if weight.dtype != torch.bfloat16:
            raise Unsupported("mlx-lm: the text model's norms have bf16 weights")
        layer = nn.RMSNorm(x.shape[-1], eps=eps)
        layer.weight = to_mlx(weight)
        return to_torch(layer(to_mlx(x)))

    # rotary ---------------------------------------------------------------------------------------------------------

    def rotary_frequencies(self, config: Config, layer_id: int) -> Array:
        """mlx keeps periods; its kernel divides by them."""
        return to_torch(1.0 / bare_attention(config, layer_id).rope._freqs)

    def rotary_tables(self, config: Config, layer_id: int, positions: Array) -> tuple[Array, Array]:
        """Cosine and sine, read off (1, 0) in every pair."""
        width = config["rope_head_dim"]
        unit = mx.broadcast_to(mx.array([1.0, 0.0] * (width // 2)), (len(positions), 1, width))
        rope = bare_attention(config, layer_id).rope
        turned = to_torch(D._apply_rope(unit, rope, rope_dim=width, offset=offsets(positions)))[:, 0]
        return turned[:, 0::2].contiguous(), turned[:, 1::2].contiguous()

    def rotate(self, config: Config, layer_id: int, x: Array, positions: Array, inverse: bool) -> Array:
        """Every token a batch entry of its own, so that any position may follow any other."""
        turned = D._apply_rope(
            by_token(x),
            bare_attention(config, layer_id).rope,
            rope_dim=config["rope_head_dim"],
            offset=offsets(positions),
            inverse=inverse,
        )
        return to_torch(turned).reshape(x.shape)

    # hyper_connections ----------------------------------------------------------------------------------------------

    def hyper_connection_coefficients(
        self, config: Config, h: Array, fn: Array, scale: Array, base: Array
    ) -> tuple[Array, Array, Array]:
        """One hyper-connection."""
        connection = D.HyperConnection(arguments(config))
        connection.fn, connection.scale, connection.base = to_mlx(fn), to_mlx(scale), to_mlx(base)
        pre, post, comb = connection(to_mlx(h))
        return to_torch(pre), to_torch(post), to_torch(comb)

    def hyper_connection_read(self, h: Array, pre: Array) -> Array:
        """Collapse the streams."""
        return to_torch(D._collapse(to_mlx(h), to_mlx(pre)))

    def hyper_connection_write(self, y: Array, h: Array, post: Array, comb: Array) -> Array:
        """Expand into the streams."""
        return to_torch(D._expand(to_mlx(y), to_mlx(h), to_mlx(post), to_mlx(comb)))

    # sparse_attention, ends of the model -----------------------------------------------------------------------------

    def sparse_attention(self, q: Array, kv: Array, indices: Array, sink: Array, scale: float) -> Array:
        """mlx's attention over gathered rows."""
        return to_torch(
            D._sparse_attention(to_mlx(q), [to_mlx(kv)], [to_mlx(indices)], sinks=to_mlx(sink), scale=scale)
        )

    def embed(self, weight: Array, input_ids: Array) -> Array:
        """mlx's embedding layer."""
        layer = nn.Embedding(1, 1)
        layer.weight = to_mlx(weight)
        return to_torch(layer(to_mlx(input_ids)))

    def greedy(self, logits: Array) -> Array:
        """mlx-lm's sampler at temperature 0."""
        return to_torch(make_sampler(temp=0.0)(to_mlx(logits)).astype(mx.int32))


def _linear(x: Any, weight: Any) -> Any:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = weight
    return layer(x)


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """The tensor, where its last axis is whole groups: mlx-lm passes over others or has no layout for them."""
    if x.shape[-1] % group:
        raise Unsupported(f"mlx-lm: widths that are no multiple of {group}")
    return x


def bare_attention(config: Config, layer_id: int) -> Any:
    """An attention without weights, for what needs none."""
    return D.Attention(arguments(config), layer_id)


def by_token(x: torch.Tensor) -> Any:
    """[B,T,...] with every token as a batch entry of its own: [B*T,1,...]."""
    return to_mlx(x.reshape(-1, 1, *x.shape[2:]))


def offsets(positions: torch.Tensor) -> Any:
    """Positions as mlx's rotary layer takes them, one a batch entry."""
    return to_mlx(positions.reshape(-1).to(torch.int32))
