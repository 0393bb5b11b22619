"""Mistakes that somebody could make and that no fault of the catalogue makes: each is one edit of the reference."""

from __future__ import annotations

from conformance.faults.patches import Edit

UNLISTED: dict[str, Edit] = {
    "norm/eps-of-another-model": Edit("norm.rms_norm", "keepdim=True) + eps", "keepdim=True) + 1e-3"),
    "norm/one-percent-too-large": Edit("norm.rms_norm", "normed * weight", "1.01 * normed * weight"),
    "norm/weight-shifted-by-one": Edit("norm.rms_norm", "weight.to(compute)", "weight.to(compute).roll(1)"),
    "norm/first-feature-not-counted": Edit("norm.rms_norm", "x.square().mean(", "x[..., 1:].square().mean("),
    "norm/weight-squared": Edit("norm.rms_norm", "normed * weight.to(compute)", "normed * weight.to(compute) ** 2"),
    "rotary/last-pair-left-out": Edit(
        "rotary.rotate", "if inverse:", "sin = sin * (torch.arange(sin.shape[-1]) < sin.shape[-1] - 1)\n    if inverse:"
    ),
    "rotary/positions-doubled": Edit(
        "rotary.rotary_tables", "positions.to(torch.float32)", "2 * positions.to(torch.float32)"
    ),
    "rotary/base-eleven-thousand": Edit(
        "rotary._frequencies",
        "config.rope_head_dim, config.rope_theta)",
        "config.rope_head_dim, 1.1 * config.rope_theta)",
    ),
    "rotary/half-an-angle": Edit("rotary.rotary_tables", "angles.to(compute))", "0.5 * angles.to(compute))"),
    "hyper_connections/post-three-times": Edit(
        "hyper_connections.hyper_connection_coefficients", "2.0 * torch.sigmoid(post)", "3.0 * torch.sigmoid(post)"
    ),
    "hyper_connections/softmax-at-two-degrees": Edit(
        "hyper_connections.sinkhorn",
        "c = torch.exp(c - c.amax(dim=-1, keepdim=True))",
        "c = torch.exp(0.5 * (c - c.amax(dim=-1, keepdim=True)))",
    ),
    "hyper_connections/offset-tripled": Edit(
        "hyper_connections.hyper_connection_coefficients", "+ base.to(compute)", "+ 3 * base.to(compute)"
    ),
    "hyper_connections/streams-read-in-reverse": Edit(
        "hyper_connections.hyper_connection_read", "pre.unsqueeze(-1) * h", "pre.flip(-1).unsqueeze(-1) * h"
    ),
    "hyper_connections/written-stream-swapped": Edit(
        "hyper_connections.hyper_connection_write", "+ mixed)", "+ mixed[..., [1, 0, *range(2, mixed.shape[-2])], :])"
    ),
    "linear/first-output-repeated": Edit(
        "linear.linear_fp8", "scale_by_row))", "scale_by_row)[..., [0, *range(weight.shape[0] - 1)]])"
    ),
    "linear/half-a-percent-too-small": Edit(
        "linear.linear_bf16", "weight.to(compute)))", "weight.to(compute)) * 0.995)"
    ),
    "linear/input-turned-around": Edit(
        "linear.linear_fp32", "functional.linear(x.to(compute)", "functional.linear(x.flip(-1).to(compute)"
    ),
    "linear/output-bias-of-one-hundredth": Edit(
        "linear.linear_bf16", "weight.to(compute)))", "weight.to(compute)) + 0.01)"
    ),
    "sparse_attention/scale-one-tenth-too-large": Edit("sparse_attention._attend", ") * scale", ") * (1.1 * scale)"),
    "sparse_attention/sink-halved": Edit(
        "sparse_attention._attend", "torch.exp(sink - maximum)", "0.5 * torch.exp(sink - maximum)"
    ),
    "sparse_attention/value-rows-shifted": Edit(
        "sparse_attention._attend",
        "to_bf16(probabilities).to(compute) @ rows",
        "to_bf16(probabilities).to(compute) @ rows.roll(1, -2)",
    ),
    "sparse_attention/logits-capped-at-one": Edit(
        "sparse_attention._attend", "scores = scores.masked_fill", "scores = torch.tanh(scores).masked_fill"
    ),
    "indexer/scores-tripled": Edit(
        "indexer._score_heads",
        "to_bf16(weighted.to(compute).sum(dim=2))",
        "to_bf16(3 * weighted.to(compute).sum(dim=2))",
    ),
    "indexer/relu-leaks": Edit("indexer._score_heads", "torch.relu(dots)", "torch.nn.functional.leaky_relu(dots)"),
    "indexer/two-too-many-visible": Edit("indexer.visible_positions", "(positions + 1)", "(positions + 5)"),
    "gate/score-to-the-third": Edit("gate.gate", ".sqrt()", ".pow(1 / 3)"),
    "gate/weights-to-two": Edit("gate.gate", "* config.route_scale", "* (2 * config.route_scale)"),
    "gate/half-the-bias": Edit("gate.gate", "(scores + bias)", "(scores + 0.5 * bias)"),
    "experts/limit-of-three": Edit(
        "experts.clamped_swiglu", "limit = config.swiglu_limit", "limit = 0.3 * config.swiglu_limit"
    ),
    "experts/up-plus-one": Edit("experts.clamped_swiglu", "up.clamp(-limit, limit)", "(up.clamp(-limit, limit) + 1)"),
    "compressor/pooled-by-first-score": Edit(
        "compressor.pool_groups", "torch.softmax(score, dim=2)", "torch.softmax(0.7 * score, dim=2)"
    ),
    "window/ring-of-last-feature-kept": Edit("window.window_update", "= rows[:, kept]", "= rows[:, kept].roll(1, -1)"),
    "engram/gate-doubled": Edit(
        "engram.engram_write", "h + gate.unsqueeze(-1) * value", "h + 2 * gate.unsqueeze(-1) * value"
    ),
    "engram/gate-of-the-plain-dot": Edit(
        "engram.engram_gate", "torch.sqrt(dot.abs().clamp(min=SMALLEST_DOT))", "dot.abs()"
    ),
    "quantize/amax-of-the-mean": Edit(
        "quantize.group_amax",
        "groups.abs().amax(dim=-1, keepdim=True)",
        "(2 * groups.abs().mean(dim=-1, keepdim=True))",
    ),
    "attention/groups-projected-twice-as-large": Edit(
        "attention.attention_output", "by_group.to(compute)))", "2 * by_group.to(compute)))"
    ),
    "attention/first-group-left-out": Edit(
        "attention.attention_output", "low.flatten(-2)", "low.index_fill(-2, torch.tensor([0]), 0.0).flatten(-2)"
    ),
}
