"""Small ports that share no code with the reference, each with one mistake, written as a porter would write it.

They add in float64 and round where the specification rounds: their last bits are not the reference's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

import conformance

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def bf16(x: Tensor) -> Tensor:
    return x.float().bfloat16()


def from_e8m0(scale: Tensor) -> Tensor:
    return torch.exp2(scale.view(torch.uint8).double() - 127)


def fp8_matrix(weight: Tensor, scale: Tensor) -> Tensor:
    spread = from_e8m0(scale).repeat_interleave(32, 0).repeat_interleave(32, 1)
    return weight.double() * spread[: weight.shape[0], : weight.shape[1]]


def q8(x: Tensor) -> Tensor:
    """Values after the quantiser, in float64."""
    groups = x.double().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    return ((groups / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)


class Port(conformance.Implementation):
    tensor_type = "torch"

    def describe(self) -> conformance.Description:
        return conformance.Description("planted", "1")


class DequantisedAtLoad(Port):
    def linear_fp8(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return bf16(x.double() @ fp8_matrix(weight, scale).T)


class TileScalesOffByOne(Port):
    def linear_fp8(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return bf16(q8(x) @ fp8_matrix(weight, scale.view(torch.uint8).roll(1, 0)).T)


class NibblesSwapped(Port):
    def dequantize_fp4_weight(self, weight: Tensor, scale: Tensor) -> Tensor:
        codes = torch.stack((weight >> 4, weight & 15), -1).flatten(-2).int()
        values = E2M1[codes & 7] * (1 - 2.0 * (codes >> 3))
        return bf16(values.double() * from_e8m0(scale).repeat_interleave(32, -1))


class HalfSplitRotation(Port):
    def rotate(self, config: Any, layer_id: int, x: Tensor, positions: Tensor, inverse: bool) -> Tensor:
        width = config["rope_head_dim"]
        ratio = config["compress_ratios"][layer_id]
        base = config["compress_rope_theta"] if ratio else config["rope_theta"]
        exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
        frequency = np.float32(1) / np.power(np.float32(base), exponents)
        if ratio:
            frequency = self.yarn(config, frequency, base, width)
        angle = (positions.float().unsqueeze(-1) * torch.from_numpy(frequency.astype(np.float32))).double()
        angle = angle.reshape(*positions.shape, *(1,) * (x.ndim - 3), width // 2) * (-1 if inverse else 1)
        kept, turned = x[..., :-width], x[..., -width:].double()
        first, second = turned[..., : width // 2], turned[..., width // 2 :]
        real = first * angle.cos() - second * angle.sin()
        imaginary = first * angle.sin() + second * angle.cos()
        return torch.cat((kept, bf16(torch.cat((real, imaginary), -1))), -1)

    @staticmethod
    def yarn(config: Any, frequency: Any, base: float, width: int) -> Any:
        def edge(turns: float) -> float:
            return width * math.log(config["original_seq_len"] / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(edge(config["beta_fast"])), 0), min(math.ceil(edge(config["beta_slow"])), width - 1)
        ramp = np.clip((np.arange(width // 2, dtype=np.float32) - low) / max(high - low, 1e-3), 0, 1).astype(np.float32)
        return frequency / np.float32(config["rope_factor"]) * ramp + frequency * (1 - ramp)


class CombTransposed(Port):
    def hyper_connection_write(self, y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        mixed = torch.einsum("btkj,btjd->btkd", comb.double(), h.double())
        return bf16(post.double().unsqueeze(-1) * y.double().unsqueeze(-2) + mixed)


class NormOfVision(Port):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean = x.double().square().mean(-1, keepdim=True)
        return bf16(x.double() * torch.rsqrt(mean + 1e-6) * weight.double())


class Scored(Port):
    relu, rounds = True, True

    def index_scores(
        self, config: Any, layer_id: int, queries: Tensor, head_weights: Tensor, keys: Tensor, positions: Tensor,
        candidates: Tensor | None,
    ) -> Tensor:  # fmt: skip
        dots = bf16(torch.einsum("bthd,bcd->bthc", queries.double(), keys.double()))
        products = bf16((dots.clamp(min=0) if self.relu else dots).double() * head_weights.double().unsqueeze(-1))
        visible = torch.arange(keys.shape[1]) < ((positions + 1) // config["compress_ratios"][layer_id]).unsqueeze(-1)
        if candidates is not None:
            visible = visible & candidates
        return bf16(products.double().sum(2)).masked_fill(~visible, -torch.inf)


class ReluLeftOut(Scored):
    relu = False


class SinkScaled(Port):
    def sparse_attention(self, q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor, scale: float) -> Tensor:
        rows = kv.double()[torch.arange(len(kv))[:, None, None], indices.clamp(min=0).long()]
        scores = torch.einsum("bthd,btnd->bthn", q.double(), rows) * scale
        scores = scores.masked_fill((indices < 0).unsqueeze(2), -torch.inf)
        top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True) + torch.exp(sink.double()[:, None] * scale - top)
        return bf16(torch.einsum("bthn,btnd->bthd", bf16(weights).double(), rows) / total)


class BiasInTheWeights(Port):
    def gate(self, config: Any, weights: Any, x: Tensor, image_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = x.double() @ weights["weight"].double().T
        bias = weights["bias"].double()
        if image_mask is not None:
            bias = torch.where(image_mask.unsqueeze(-1), weights["bias_vl"].double(), bias)
        biased = torch.nn.functional.softplus(logits).sqrt() + bias
        best, chosen = biased.topk(config["n_activated_experts"], -1)
        return (best / (best.sum(-1, keepdim=True) + 1e-20) * config["route_scale"]).float(), chosen.int()


class ScaleRoundedDown(Port):
    def quantize_fp8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        groups = x.double().unflatten(-1, (-1, 32))
        exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=1e-4) / 448))
        codes = (groups / torch.exp2(exponent).unsqueeze(-1)).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        return codes.flatten(-2), (exponent + 127).to(torch.uint8)


class OneRowTooMany(Port):
    def window_indices(self, config: Any, start_pos: int, length: int) -> Tensor:
        width = config["window_size"]
        if start_pos:
            slots = torch.arange(width)
            newest = torch.arange(start_pos, start_pos + length).unsqueeze(1)
            return torch.where(slots <= newest, slots, -1).int()
        query, key = torch.arange(length).unsqueeze(1), torch.arange(length)
        listed = torch.where((key <= query) & (key >= query - width), key, length).sort(-1).values[:, : width + 1]
        return torch.where(listed < length, listed, -1).int()


class Zeros(Port):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.zeros_like(x)


def noise(x: Tensor, size: float) -> Tensor:
    return size * torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel())).to(x)


class NoisyNorm(Port):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean = x.double().square().mean(-1, keepdim=True)
        exact = x.double() * torch.rsqrt(mean + eps)
        return bf16((exact + noise(exact, 0.05)) * weight.double())


class NoisyProduct(Port):
    def linear_fp8(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        exact = q8(x) @ fp8_matrix(weight, scale).T
        return bf16(exact * (1 + noise(exact, 0.02)))


class ScaledProduct(Port):
    """All of it too large by one in a hundred."""

    def linear_fp8(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return bf16(q8(x) @ fp8_matrix(weight, scale).T * 1.01)


class OneRandomElement(Port):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean = x.double().square().mean(-1, keepdim=True)
        out = bf16(x.double() * torch.rsqrt(mean + eps) * weight.double())
        out.view(-1)[out.numel() // 2] *= 1.37
        return out
