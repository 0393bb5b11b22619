"""Mistakes at the ends of the model, in its parameter counts and in sampling (numerics.md 0 and 9)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

M = "model"
STEP = "model.Model.step"
COUNTS = "parameters.parameter_counts"

FAULTS: tuple[Fault, ...] = (
    Fault(
        M,
        "embedding-scaled",
        "embedding-scaled",
        "Embedding rows are multiplied by the root of the width.",
        Edit("model.embed", "weight[input_ids.long()]", "weight[input_ids.long()] * weight.shape[-1] ** 0.5"),
    ),
    Fault(
        M,
        "embedding-row-off-by-one",
        "embedding-row-off",
        "Rows begin at id 1.",
        Edit("model.embed", "input_ids.long()", "(input_ids.long() - 1)"),
    ),
    Fault(
        M,
        "streams-averaged",
        "streams-averaged",
        "The stack's end averages the streams.",
        Edit("model.collapse", "hyper_connection_read(h, pre, compute=compute)", "to_bf16(h.to(compute).mean(dim=-2))"),
    ),
    Fault(
        M,
        "first-stream-only",
        "streams-averaged",
        "The stack's end reads the first stream.",
        Edit("model.collapse", "hyper_connection_read(h, pre, compute=compute)", "h[..., 0, :]"),
    ),
    Fault(
        M,
        "final-norm-missing",
        "final-norm-missing",
        "The final norm is missing.",
        Edit("model.collapse", 'rms_norm(x, weights["norm.weight"], config.norm_eps, compute=compute)', "x"),
    ),
    Fault(
        M,
        "logits-in-bf16",
        "logits-in-bf16",
        "Logits are rounded to bf16.",
        Edit(
            "model.head",
            'linear_fp32(final_norm, weights["head.weight"], compute=compute)',
            'arithmetic.as_bf16(linear_fp32(final_norm, weights["head.weight"], compute=compute))',
        ),
    ),
    Fault(
        M,
        "logits-of-first-position",
        "logits-position",
        "A prompt's logits are those of its first position.",
        Edit(STEP, 'taps["final_norm"][:, -1]', 'taps["final_norm"][:, 0]'),
    ),
    Fault(
        M,
        "first-mix-missing",
        "first-mix-not-one-hot",
        "The first layer reads with a mix of zeros.",
        Edit("hyper_connections.one_hot_mix", "pre[..., 0] = 1.0", "pass"),
    ),
    Fault(
        M,
        "streams-begin-with-zeros",
        "first-mix-not-one-hot",
        "Only the first stream begins with the embedding.",
        Edit(
            STEP,
            "placed.unsqueeze(2).expand(-1, -1, config.hc_mult, -1).contiguous()",
            "torch.nn.functional.pad(placed.unsqueeze(2), (0, 0, 0, config.hc_mult - 1))",
        ),
    ),
    Fault(
        M,
        "image-not-placed",
        "image-not-placed",
        "Image features never reach the embedding.",
        Edit("model.place_image", "torch.where(image_mask.unsqueeze(-1), image_features, embedded)", "embedded"),
    ),
    Fault(
        M,
        "image-mask-lost",
        "gate-image-bias",
        "Layers never hear of image tokens.",
        Edit(STEP, "start_pos, image_mask, kept_taps", "start_pos, None, kept_taps"),
    ),
    Fault(
        M,
        "count-one-gate-bias",
        "parameter-count",
        "Only one of the two gate biases is counted.",
        Edit("parameters.moe_shapes", '"gate.bias_vl": (config.n_routed_experts,),', ""),
    ),
    Fault(
        M,
        "count-compressor-everywhere",
        "parameter-count",
        "Re-indexing layers own index keys.",
        Edit("parameters.attention_shapes", "if config.owns_index(layer_id):", "if config.selects(layer_id):"),
    ),
    Fault(
        M,
        "count-shared-expert-missing",
        "parameter-count",
        "The shared expert is not counted.",
        Edit("parameters.moe_shapes", "if config.n_shared_experts:", "if config.n_shared_experts < 0:"),
    ),
    Fault(
        "sampling",
        "smallest-logit",
        "argmax-wrong",
        "The smallest logit wins.",
        Edit("sampling.greedy", "logits.argmax", "logits.argmin"),
    ),
    Fault(
        "sampling",
        "largest-magnitude",
        "argmax-wrong",
        "The largest magnitude wins.",
        Edit("sampling.greedy", "logits.argmax", "logits.abs().argmax"),
    ),
    Fault(
        "sampling",
        "tile-start",
        "argmax-tile-start",
        "The start of the winning tile is answered.",
        Edit("sampling.greedy", "logits.argmax(dim=-1)", "(logits.argmax(dim=-1) // 16 * 16)"),
    ),
    Fault(
        "sampling",
        "last-tile-lost",
        "argmax-last-tile-lost",
        "A vocabulary that is no multiple of the tile loses its end.",
        Edit("sampling.greedy", "logits.argmax", "logits[..., : max(1, (logits.shape[-1] - 1) // 16 * 16)].argmax"),
    ),
    Fault(
        "sampling",
        "last-lane-lost",
        "argmax-last-tile-lost",
        "The last id is never looked at.",
        Edit("sampling.greedy", "logits.argmax", "logits[..., :-1].argmax"),
    ),
    Fault(
        "sampling",
        "starts-at-zero",
        "argmax-starts-at-zero",
        "The search begins with a best of zero.",
        Edit("sampling.greedy", "logits.argmax", "logits.clamp(min=0.0).argmax"),
    ),
    Fault(
        "sampling",
        "in-bf16",
        "argmax-in-bf16",
        "Logits are compared in bf16.",
        Edit("sampling.greedy", "logits.argmax", "logits.bfloat16().argmax"),
    ),
    Fault(
        "sampling",
        "equal-logits-summed",
        "argmax-sums-ties",
        "The ids of equal largest logits are added up.",
        Edit(
            "sampling.greedy",
            "logits.argmax(dim=-1)",
            "((logits == logits.amax(-1, keepdim=True)) * torch.arange(logits.shape[-1])).sum(-1)",
        ),
    ),
)
