"""Mistakes in the experts and in the mixture around them (numerics.md 7)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

E = "experts"
SWIGLU = "experts.clamped_swiglu"
ONE = "experts.expert_of_quantized"
ALL = "experts.experts"
SILU = "functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)"

FAULTS: tuple[Fault, ...] = (
    Fault(
        E,
        "gate-clamped-below",
        "expert-clamp",
        "The gate is clamped from below as well.",
        Edit(SWIGLU, "gate.clamp(max=limit)", "gate.clamp(-limit, limit)"),
    ),
    Fault(
        E,
        "gate-not-clamped",
        "expert-clamp",
        "The gate is not clamped.",
        Edit(SWIGLU, "gate.clamp(max=limit)", "gate"),
    ),
    Fault(
        E,
        "up-not-clamped-below",
        "expert-clamp",
        "The up projection is clamped from above only.",
        Edit(SWIGLU, "up.clamp(-limit, limit)", "up.clamp(max=limit)"),
    ),
    Fault(
        E,
        "up-not-clamped",
        "expert-clamp",
        "The up projection is not clamped.",
        Edit(SWIGLU, "up.clamp(-limit, limit)", "up"),
    ),
    Fault(
        E,
        "clamped-after-silu",
        "expert-clamp",
        "The clamp comes after the activation.",
        Edit(SWIGLU, "functional.silu(gate.clamp(max=limit))", "functional.silu(gate).clamp(max=limit)"),
    ),
    Fault(
        E,
        "shared-not-clamped",
        "expert-clamp",
        "The shared expert goes without the clamps.",
        Edit(
            ONE,
            "clamped_swiglu(config, g, u)",
            "clamped_swiglu(config, g, u) if routing_weight is not None else functional.silu(g) * u",
        ),
    ),
    Fault(
        E,
        "gelu",
        "expert-activation",
        "The activation is a GELU.",
        Edit(SWIGLU, "functional.silu(gate.clamp(max=limit))", "functional.gelu(gate.clamp(max=limit))"),
    ),
    Fault(
        E,
        "gate-and-up-swapped",
        "expert-weights-swapped",
        "w1 and w3 are exchanged.",
        Edit(ONE, "clamped_swiglu(config, g, u)", "clamped_swiglu(config, u, g)"),
    ),
    Fault(
        E,
        "silu-in-bf16",
        "expert-rounded-early",
        "The activation is rounded to bf16 before the product.",
        Edit(
            SWIGLU,
            SILU,
            SILU.replace(
                "functional.silu(gate.clamp(max=limit))", "arithmetic.as_bf16(functional.silu(gate.clamp(max=limit)))"
            ),
        ),
    ),
    Fault(
        E,
        "hidden-rounded-before-weight",
        "expert-rounded-early",
        "The hidden values are rounded before their weight.",
        Edit(ONE, "hidden * routing_weight", "arithmetic.as_bf16(hidden) * routing_weight"),
    ),
    Fault(
        E,
        "hidden-truncated",
        "bf16-truncated",
        "The hidden values are cut to bf16 instead of rounded.",
        Edit(ONE, "to_bf16(hidden)", "arithmetic.truncate(hidden)"),
    ),
    Fault(
        E,
        "weight-after-down",
        "routing-weight-late",
        "The routing weight multiplies the result of the down projection.",
        Edit(
            ONE,
            """if routing_weight is not None:
        hidden = hidden * routing_weight.to(compute).unsqueeze(-1)
    a = quantized_fp8(to_bf16(hidden), compute=compute)
    return scaled_product(a, expert_matrix(weights, "w2", compute=compute))""",
            """a = quantized_fp8(to_bf16(hidden), compute=compute)
    out = scaled_product(a, expert_matrix(weights, "w2", compute=compute))
    return out if routing_weight is None else to_bf16(out.to(compute) * routing_weight.to(compute).unsqueeze(-1))""",
        ),
    ),
    Fault(
        E,
        "weight-ignored",
        "routing-weight-ignored",
        "All chosen experts weigh the same.",
        Edit(ONE, "if routing_weight is not None:", "if routing_weight is None and len(a) == 0:"),
    ),
    Fault(
        E,
        "weight-in-bf16",
        "routing-weight-in-bf16",
        "The routing weight is rounded to bf16.",
        Edit(ONE, "routing_weight.to(compute)", "arithmetic.as_bf16(routing_weight.to(compute))"),
    ),
    Fault(
        E,
        "shared-missing",
        "shared-expert-missing",
        "The shared expert is left out.",
        Edit(ALL, "if config.n_shared_experts:", "if config.n_shared_experts < 0:"),
    ),
    Fault(
        E,
        "shared-scaled",
        "shared-expert-scaled",
        "The shared expert gets the factor of the routed ones.",
        Edit(
            ALL,
            "config, shared, a, None",
            "config, shared, a, torch.full(x.shape[:1], config.route_scale)",
        ),
    ),
    Fault(
        E,
        "sum-in-bf16",
        "bf16-accumulator",
        "The sum over experts is kept in bf16.",
        Edit(
            ALL,
            "total.index_add_(0, token, out.to(compute))",
            "total = arithmetic.as_bf16(total.index_add(0, token, out.to(compute)))",
        ),
    ),
    Fault(
        E,
        "routed-rounded-before-shared",
        "experts-rounded-early",
        "The routed sum is rounded before the shared expert.",
        Edit(ALL, "total = total + expert", "total = arithmetic.as_bf16(total) + expert"),
    ),
    Fault(
        E,
        "sum-truncated",
        "bf16-truncated",
        "The result is cut to bf16 instead of rounded.",
        Edit(ALL, "to_bf16(total)", "arithmetic.truncate(total)"),
    ),
    Fault(
        E,
        "last-choice-dropped",
        "expert-dropped",
        "A token's last expert is left out, as beyond a capacity.",
        Edit(
            ALL,
            "torch.nonzero(expert_indices == index, as_tuple=True)",
            "torch.nonzero((expert_indices == index)[:, :-1], as_tuple=True)",
        ),
    ),
    Fault(
        E,
        "weight-of-first-choice",
        "gate-weights-misplaced",
        "Every expert gets the weight of the first choice.",
        Edit(ALL, "routing_weights[token, choice]", "routing_weights[token, 0 * choice]"),
    ),
    Fault(
        E,
        "last-tokens-lost",
        "expert-tokens-lost",
        "An expert's tokens beyond the first are lost.",
        Edit(ALL, "total.index_add_(0, token, out.to(compute))", "total.index_add_(0, token[:1], out[:1].to(compute))"),
    ),
    Fault(
        "moe",
        "image-mask-lost",
        "gate-image-bias",
        "The gate never hears of image tokens.",
        Edit("moe.moe_taps", "x, image_mask, compute", "x, None, compute"),
    ),
    Fault(
        "moe",
        "weights-in-bf16",
        "routing-weight-in-bf16",
        "Routing weights pass between kernels in bf16.",
        Edit("moe.moe_taps", "x, routing, indices", "x, arithmetic.as_bf16(routing), indices"),
    ),
    Fault(
        "moe",
        "weights-of-next-token",
        "gate-weights-misplaced",
        "Tokens get the routing weights of their neighbours.",
        Edit("moe.moe_taps", "x, routing, indices", "x, routing.roll(1, 0), indices"),
    ),
    Fault(
        "moe",
        "experts-off-by-one",
        "expert-number",
        "Expert numbers begin at one.",
        Edit("moe.moe_taps", "x, routing, indices", "x, routing, (indices + 1) % config.n_routed_experts"),
    ),
)
