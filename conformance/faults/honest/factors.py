"""Variants that take the factors of a product, or a division, in another order between the same rounding points."""

from __future__ import annotations

from conformance.faults.honest.variant import HonestVariant
from conformance.faults.patches import Edit

ANY_ORDER = "The factors of a product in fp32 may be taken in any order (numerics.md 0)."

ROUTING_WEIGHT = "routing_weight.to(compute).unsqueeze(-1)"
GATE = "functional.silu(g.clamp(max=limit))"
UP = "u.clamp(-limit, limit)"

FACTORS: tuple[HonestVariant, ...] = (
    HonestVariant(
        "streams-normed-first",
        "The residual may be normed before it is projected, or the projection after it.",
        changes=(
            Edit(
                "hyper_connections.hyper_connection_coefficients",
                "functional.linear(flat, fn.to(compute)) * inverse_rms",
                "functional.linear(flat * inverse_rms, fn.to(compute))",
            ),
        ),
    ),
    HonestVariant(
        "coefficient-scale-in-weights",
        ANY_ORDER,
        changes=(
            Edit(
                "hyper_connections.hyper_connection_coefficients",
                "functional.linear(flat, fn.to(compute)) * inverse_rms",
                "functional.linear(flat, fn.to(compute) * "
                "scale.to(compute).repeat_interleave(torch.tensor([streams, streams, streams**2])).unsqueeze(-1))"
                " * inverse_rms",
            ),
            Edit("hyper_connections.hyper_connection_coefficients", "mixes * repeated_scale +", "mixes +"),
        ),
    ),
    *(
        HonestVariant(
            name,
            "The routing weight may enter before the product of gate and up: nothing is rounded between them.",
            changes=(
                Edit(
                    "experts.expert_of_quantized",
                    f"hidden = hidden * {ROUTING_WEIGHT}",
                    f"limit = config.swiglu_limit\n        hidden = {product}",
                ),
            ),
        )
        for name, product in (
            ("routing-weight-on-gate", f"({GATE} * {ROUTING_WEIGHT}) * {UP}"),
            ("routing-weight-on-up", f"{GATE} * ({UP} * {ROUTING_WEIGHT})"),
        )
    ),
    HonestVariant(
        "route-scale-first",
        ANY_ORDER,
        changes=(
            Edit(
                "gate.gate",
                "chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20) * config.route_scale",
                "chosen * (config.route_scale / (chosen.sum(dim=-1, keepdim=True) + 1e-20))",
            ),
        ),
    ),
    HonestVariant(
        "pool-divided-last",
        "A group may be pooled with weights that are not normed, and divided by their sum.",
        changes=(
            Edit(
                "compressor.pool_groups",
                "(kv * torch.softmax(score, dim=2)).sum(dim=2)",
                "(kv * torch.exp(score - score.amax(dim=2, keepdim=True))).sum(dim=2)"
                " / torch.exp(score - score.amax(dim=2, keepdim=True)).sum(dim=2)",
            ),
        ),
    ),
    HonestVariant(
        "engram-operands-normed",
        "Residual and key may be normed before their product, or their product after it.",
        changes=(
            Edit(
                "engram.engram_gate",
                "dot = (h * q_weight * k_weight * key).sum(dim=-1)",
                "normed_h = h * torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + config.norm_eps) * q_weight\n"
                "    normed_key = key * torch.rsqrt(key.square().mean(dim=-1, keepdim=True) + config.norm_eps)\n"
                "    dot = (normed_h * (normed_key * k_weight)).sum(dim=-1)",
            ),
            Edit(
                "engram.engram_gate",
                "    dot = dot * torch.rsqrt(h.square().mean(dim=-1) + config.norm_eps)\n"
                "    dot = dot * torch.rsqrt(key.square().mean(dim=-1) + config.norm_eps) * h.shape[-1] ** -0.5\n",
                "    dot = dot * h.shape[-1] ** -0.5\n",
            ),
        ),
    ),
    HonestVariant(
        "mix-as-product",
        "The read of the streams is a product of a row and a matrix.",
        changes=(
            Edit(
                "hyper_connections.hyper_connection_read",
                "(pre.unsqueeze(-1) * h).sum(dim=-2)",
                "(pre.unsqueeze(-2) @ h).squeeze(-2)",
            ),
        ),
    ),
)
