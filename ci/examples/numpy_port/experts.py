"""Gate and mixture of experts (numerics.md 7)."""

import numpy as np

import linear
from hyper_connections import sigmoid
from quantize import bf16


def gate(config, weights, x, image_mask=None):
    """Experts are chosen with a bias and weighted without it."""
    z = linear.linear_fp32(x, weights["weight"])
    scores = np.sqrt(np.where(z > 20, z, np.log1p(np.exp(z))))
    biased = scores + weights["bias"]
    if image_mask is not None:
        biased = np.where(image_mask[:, None], scores + weights["bias_vl"], biased)
    chosen = np.argsort(-biased, axis=-1, kind="stable")[:, : config["n_activated_experts"]]
    kept = np.take_along_axis(scores, chosen, axis=-1)
    kept = kept / (kept.sum(axis=-1, keepdims=True) + np.float32(1e-20)) * np.float32(config["route_scale"])
    return kept, chosen.astype(np.int32)


def expert(config, weights, x, routing_weight=None, prefix=""):
    """One expert; its matrices are packed FP4 when they have half as many columns as inputs, else FP8."""

    def project(name, inputs):
        weight, scale = weights[f"{prefix}{name}.weight"], weights[f"{prefix}{name}.scale"]
        layer = linear.linear_fp8 if weight.shape[1] == inputs.shape[-1] else linear.linear_fp4
        return layer(inputs, weight, scale)

    limit = np.float32(config["swiglu_limit"])
    gated = np.minimum(project("w1", x), limit)
    up = np.clip(project("w3", x), -limit, limit)
    hidden = gated * sigmoid(gated) * up
    if routing_weight is not None:
        hidden = hidden * routing_weight[:, None]
    return project("w2", bf16(hidden))


def experts(config, weights, x, routing_weights, expert_indices):
    """The chosen experts and the shared one, summed in float32."""
    out = np.zeros(x.shape, np.float32)
    for index in np.unique(expert_indices):
        tokens, place = np.nonzero(expert_indices == index)
        out[tokens] += expert(config, weights, x[tokens], routing_weights[tokens, place], f"experts.{index}.")
    return bf16(out + expert(config, weights, x, prefix="shared_experts."))


def moe(config, weights, x, image_mask=None):
    """Gate and experts together."""
    gate_weights = {name: weights[f"gate.{name}"] for name in ("weight", "bias", "bias_vl")}
    return experts(config, weights, x, *gate(config, gate_weights, x, image_mask))
