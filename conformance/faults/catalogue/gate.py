"""Mistakes in the gate of the mixture (numerics.md 7)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

G = "gate"
GATE = "gate.gate"
SCORES = 'functional.softplus(linear_fp32(x, weights["weight"], compute=compute)).sqrt()'
LOGITS = 'linear_fp32(x, weights["weight"], compute=compute)'

FAULTS: tuple[Fault, ...] = (
    Fault(
        G,
        "bias-in-weights",
        "gate-bias-in-weights",
        "The selection bias enters the routing weights.",
        Edit(GATE, "chosen = scores.gather", "chosen = (scores + bias).gather"),
    ),
    Fault(
        G,
        "bias-ignored",
        "gate-bias-ignored",
        "Experts are chosen without the selection bias.",
        Edit(GATE, "(scores + bias).topk", "scores.topk"),
    ),
    Fault(
        G,
        "bias-before-activation",
        "gate-bias-ignored",
        "The bias is added to the logits.",
        Edit(GATE, "(scores + bias).topk", f"functional.softplus({LOGITS} + bias).topk"),
    ),
    Fault(
        G,
        "image-bias-ignored",
        "gate-image-bias",
        "Image tokens are routed with the text bias.",
        Edit(GATE, 'weights["bias_vl"]', 'weights["bias"]'),
    ),
    Fault(
        G,
        "image-bias-for-all",
        "gate-image-bias",
        "Text tokens are routed with the image bias.",
        Edit(GATE, 'bias = weights["bias"].to(compute)', 'bias = weights["bias_vl"].to(compute)'),
    ),
    Fault(
        G,
        "image-mask-inverted",
        "gate-image-bias",
        "The two biases are swapped where an image is present.",
        Edit(GATE, "torch.where(image_mask.unsqueeze(-1)", "torch.where(~image_mask.unsqueeze(-1)"),
    ),
    Fault(
        G,
        "sigmoid",
        "gate-activation",
        "Scores are sigmoids, as in an earlier model.",
        Edit(GATE, SCORES, f"torch.sigmoid({LOGITS})"),
    ),
    Fault(
        G,
        "softmax",
        "gate-activation",
        "Scores are a softmax over the experts.",
        Edit(GATE, SCORES, f"torch.softmax({LOGITS}, dim=-1)"),
    ),
    Fault(
        G,
        "no-root",
        "gate-activation",
        "The square root is missing.",
        Edit(GATE, SCORES, SCORES.removesuffix(".sqrt()")),
    ),
    Fault(
        G,
        "softplus-underflow",
        "softplus-underflow",
        "log(1 + exp(x)) is zero below -17.",
        Edit(GATE, SCORES, f"torch.log(1.0 + torch.exp({LOGITS})).sqrt()"),
    ),
    Fault(
        G,
        "softplus-linear-above-2",
        "softplus-threshold",
        "The linear branch begins far too early.",
        Edit(GATE, f"functional.softplus({LOGITS})", f"functional.softplus({LOGITS}, threshold=2.0)"),
    ),
    Fault(
        G,
        "not-normalised",
        "gate-normalisation",
        "The weights are not divided by their sum.",
        Edit(GATE, "chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)", "chosen"),
    ),
    Fault(
        G,
        "normalised-over-all",
        "gate-normalisation",
        "The weights are divided by the sum over all experts.",
        Edit(GATE, "chosen.sum(dim=-1, keepdim=True)", "scores.sum(dim=-1, keepdim=True)"),
    ),
    Fault(
        G,
        "eps-missing",
        "gate-zero-sum",
        "A token whose scores are all zero is divided by zero.",
        Edit(GATE, " + 1e-20)", ")"),
    ),
    Fault(
        G,
        "route-scale-missing",
        "gate-route-scale",
        "The factor of the routed experts is missing.",
        Edit(GATE, " * config.route_scale", ""),
    ),
    Fault(
        G,
        "route-scale-before-sum",
        "gate-route-scale",
        "The factor is applied before the normalisation.",
        Edit(
            GATE,
            "/ (chosen.sum(dim=-1, keepdim=True) + 1e-20) * config.route_scale",
            "* config.route_scale / ((chosen * config.route_scale).sum(dim=-1, keepdim=True) + 1e-20)",
        ),
    ),
    Fault(
        G,
        "logits-in-bf16",
        "gate-in-bf16",
        "The logits are rounded to bf16.",
        Edit(GATE, LOGITS, f"arithmetic.as_bf16({LOGITS})"),
    ),
    Fault(
        G,
        "scores-in-bf16",
        "gate-in-bf16",
        "The scores are rounded to bf16.",
        Edit(GATE, SCORES, f"arithmetic.as_bf16({SCORES})"),
    ),
    Fault(
        G,
        "weights-in-bf16",
        "gate-in-bf16",
        "The routing weights are rounded to bf16.",
        Edit(
            GATE,
            "chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20) * config.route_scale",
            "arithmetic.as_bf16(chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20) * config.route_scale)",
        ),
    ),
    Fault(
        G,
        "experts-sorted-weights-not",
        "gate-weights-misplaced",
        "Experts are sorted by number, their weights are not.",
        Edit(
            GATE,
            "return routing, indices.to(torch.int32)",
            "return routing, indices.sort(dim=-1).values.to(torch.int32)",
        ),
    ),
    Fault(
        G,
        "first-half-of-experts",
        "gate-expert-limit",
        "The kernel sees only the first half of the experts.",
        Edit(
            GATE,
            "(scores + bias).topk",
            "(scores + bias).masked_fill(torch.arange(scores.shape[-1]) >= max(scores.shape[-1] // 2,"
            " config.n_activated_experts), -1.0).topk",
        ),
    ),
    Fault(
        G,
        "groups-of-experts",
        "gate-group-limited",
        "Experts are chosen within the better half, as in an earlier model.",
        Edit(
            GATE,
            "(scores + bias).topk",
            "(scores + bias).unflatten(-1, (2, -1)).masked_fill(((scores + bias).unflatten(-1, (2, -1)).amax(-1)"
            " < (scores + bias).amax(-1, keepdim=True)).unsqueeze(-1), -1.0).flatten(-2).topk",
        ),
    ),
    Fault(
        G,
        "softplus-overflow",
        "softplus-overflow",
        "log1p(exp(x)) overflows above 88.",
        Edit(GATE, SCORES, f"torch.log1p(torch.exp({LOGITS})).sqrt()"),
    ),
    Fault(
        G,
        "equal-scores-one-expert",
        "gate-tie",
        "Of two experts with equal scores the first is taken twice.",
        Edit(
            GATE,
            "indices = (scores + bias).topk(config.n_activated_experts, dim=-1).indices",
            "values, indices = (scores + bias).topk(config.n_activated_experts, dim=-1)\n"
            "    indices = torch.where(arithmetic.duplicates(values), indices.roll(1, -1), indices)",
        ),
    ),
)
