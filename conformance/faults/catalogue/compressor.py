"""Mistakes in the compressor and its rows (numerics.md 6.2)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

C = "compressor"
POOL = "compressor.pool_groups"
ROWS = "compressor.compressed_rows"
STEP = "compressor.Compressor.step"
LINE = "compressor.Compressor._pool"
KEEP = "compressor.Compressor._keep"
ROTATED = "rotate(config, layer_id, latent, positions, compute=compute)"
KV = 'linear_fp32(x, self.weights["wkv.weight"], compute=self.compute)'
SCORE = 'linear_fp32(x, self.weights["wgate.weight"], compute=self.compute)'

FAULTS: tuple[Fault, ...] = (
    Fault(
        C,
        "softmax-over-features",
        "softmax-over-features",
        "The gates are normalised over features, not over the group.",
        Edit(POOL, "dim=2)).sum", "dim=-1)).sum"),
    ),
    Fault(
        C,
        "mean-of-group",
        "pool-gate-ignored",
        "The group is averaged.",
        Edit(POOL, "torch.softmax(score, dim=2)", "torch.softmax(0.0 * score.clamp(min=-1.0), dim=2)"),
    ),
    Fault(
        C,
        "gate-of-first-feature",
        "pool-gate-ignored",
        "One gate a token instead of one a feature.",
        Edit(POOL, "torch.softmax(score, dim=2)", "torch.softmax(score[..., :1], dim=2)"),
    ),
    Fault(
        C,
        "pooled-not-rounded",
        "pool-rounding",
        "The pooled row is normed in fp32 without a rounding before.",
        Edit(
            POOL,
            "to_bf16((kv * torch.softmax(score, dim=2)).sum(dim=2))",
            "(kv * torch.softmax(score, dim=2)).sum(dim=2)",
        ),
    ),
    Fault(
        C,
        "pooled-truncated",
        "bf16-truncated",
        "The pooled row is cut to bf16 instead of rounded.",
        Edit(POOL, "to_bf16(", "arithmetic.truncate("),
    ),
    Fault(
        C,
        "gates-in-bf16",
        "gate-in-bf16",
        "The gates of a group of two are rounded to bf16.",
        Edit(LINE, SCORE, f"arithmetic.as_bf16({SCORE})"),
    ),
    Fault(
        C,
        "values-in-bf16",
        "pooled-in-bf16",
        "The values of a group of two are rounded to bf16.",
        Edit(LINE, KV, f"arithmetic.as_bf16({KV})"),
    ),
    Fault(
        C,
        "gate-by-value-weights",
        "compressor-weights-swapped",
        "The gates are projected with the values' weights.",
        Edit(LINE, SCORE, SCORE.replace("wgate", "wkv")),
    ),
    Fault(
        C,
        "ratio-1-in-fp32",
        "projection-not-rounded",
        "The projection of ratio 1 is not rounded before its norm.",
        Edit(STEP, "linear_bf16(x, self", "linear_fp32(x, self"),
    ),
    Fault(
        C,
        "not-normed",
        "compressor-norm",
        "The latent is not normed.",
        Edit(
            STEP,
            'rms_norm(pooled, self.weights["norm.weight"], self.config.norm_eps, compute=self.compute)',
            "pooled.bfloat16()",
        ),
    ),
    Fault(
        C,
        "carry-lost",
        "leftover-lost",
        "What waited in an unfinished group is lost at the next call.",
        Edit(LINE, ": self.ratio] = carry_kv, carry_score", ": self.ratio] = 0.0, -torch.inf"),
    ),
    Fault(
        C,
        "carry-gate-lost",
        "leftover-lost",
        "The waiting token keeps its value but not its gate.",
        Edit(LINE, ": self.ratio] = carry_kv, carry_score", ": self.ratio] = carry_kv, 0.0"),
    ),
    Fault(
        C,
        "leftover-not-kept",
        "leftover-lost",
        "A prompt's leftover token does not enter the carry.",
        Edit(KEEP, "length // self.ratio * self.ratio, length", "length, length"),
    ),
    Fault(
        C,
        "leftover-in-last-slot",
        "carry-slot-wrong",
        "Tokens wait in the slot after their own.",
        Edit(KEEP, "(start_pos[request] + index) % self.ratio", "(start_pos[request] + index + 1) % self.ratio"),
    ),
    Fault(
        C,
        "carry-of-one-request",
        "requests-mixed",
        "All requests read the first one's carry.",
        Edit(LINE, ": self.ratio] = carry_kv, carry_score", ": self.ratio] = carry_kv[:1], carry_score[:1]"),
    ),
    Fault(
        C,
        "carry-outlives-request",
        "carry-survives-request",
        "Tokens are counted on from the request before.",
        Edit(
            LINE,
            "waiting = start_pos % self.ratio",
            "seen = getattr(self, 'seen', 0)\n    self.seen = seen + length\n"
            "    waiting = torch.full_like(start_pos, seen % self.ratio)",
        ),
    ),
    Fault(
        C,
        "rows-not-rotated",
        "compressed-rotation",
        "Rows are cached without rotation.",
        Edit(ROWS, ROTATED, "latent"),
    ),
    Fault(
        C,
        "rows-not-quantised",
        "compressed-not-quantised",
        "Rows are cached in bf16.",
        Edit(ROWS, f"fake_quantize_fp4_e4m3({ROTATED})", ROTATED),
    ),
    Fault(
        C,
        "rows-quantised-before-rotation",
        "quantised-before-rotation",
        "Rows are quantised, then rotated.",
        Edit(
            ROWS,
            f"fake_quantize_fp4_e4m3({ROTATED})",
            "rotate(config, layer_id, fake_quantize_fp4_e4m3(latent), positions, compute=compute)",
        ),
    ),
    Fault(
        C,
        "rotary-part-not-quantised",
        "rotary-part-not-quantised",
        "The rotary part is kept in bf16.",
        Edit(
            ROWS,
            f"return fake_quantize_fp4_e4m3({ROTATED})",
            f"row = {ROTATED}\n    still = row.shape[-1] - config.rope_head_dim\n"
            "    return torch.cat((fake_quantize_fp4_e4m3(row)[..., :still], row[..., still:]), dim=-1)",
        ),
    ),
    Fault(
        "attention",
        "rows-by-pool-index",
        "row-turned-by-group-number",
        "A row turns by its own index instead of its first token's.",
        Edit(
            "attention.Attention._compress",
            "compressed_rows(config, layer_id, latent, row * ratio",
            "compressed_rows(config, layer_id, latent, row",
        ),
    ),
    Fault(
        "attention",
        "rows-by-last-token",
        "row-turned-by-last-token",
        "A row turns by the position of its group's last token.",
        Edit(
            "attention.Attention._compress",
            "compressed_rows(config, layer_id, latent, row * ratio",
            "compressed_rows(config, layer_id, latent, row * ratio + ratio - 1",
        ),
    ),
    Fault(
        "attention",
        "rows-one-early",
        "compressed-row-index",
        "Rows of a later call overwrite the row before their own.",
        Edit(
            "attention.Attention._compress",
            "self.compressed[request, row[request, index]] =",
            "self.compressed[request, (row[request, index] - (start_pos[request] > 0).long()).clamp(min=0)] =",
        ),
    ),
    Fault(
        C,
        "continued-mid-group",
        "chunk-mid-group",
        "A longer call that begins inside a group begins a new one.",
        Edit(LINE, "waiting = start_pos % self.ratio", "waiting = start_pos % self.ratio * (length == 1)"),
    ),
    Fault(
        C,
        "first-row-missing",
        "first-row-missing",
        "The first group of a prompt gives no row.",
        Edit(
            LINE,
            "torch.arange(n) < completed.unsqueeze(1)",
            "(torch.arange(n) < completed.unsqueeze(1)) & ((torch.arange(n) > 0) | (start_pos > 0).unsqueeze(1))",
        ),
    ),
    Fault(
        C,
        "row-too-early",
        "row-too-early",
        "A group gives its row when it begins.",
        Edit(LINE, "(waiting + length) // self.ratio", "(waiting + length + self.ratio - 1) // self.ratio"),
    ),
    Fault(
        C,
        "gates-as-sigmoids",
        "gate-not-normalised",
        "The gates of a group do not add up to one.",
        Edit(POOL, "torch.softmax(score, dim=2)", "torch.sigmoid(score)"),
    ),
    Fault(
        C,
        "gates-overflow",
        "gate-overflows",
        "The softmax goes without its maximum.",
        Edit(POOL, "torch.softmax(score, dim=2)", "(torch.exp(score) / torch.exp(score).sum(dim=2, keepdim=True))"),
    ),
    Fault(
        C,
        "gates-in-reverse",
        "gate-order-swapped",
        "Each token of a group gets the gate of the other.",
        Edit(POOL, "torch.softmax(score, dim=2)", "torch.softmax(score.flip(2), dim=2)"),
    ),
    Fault(
        C,
        "ratio-1-gated",
        "ratio-1-gated",
        "Rows of ratio 1 are gated like the others.",
        Edit(
            STEP,
            'linear_bf16(x, self.weights["wkv.weight"], compute=self.compute)',
            "to_bf16(torch.sigmoid(linear_bf16(x, self.weights['wkv.weight'], compute=self.compute).float())"
            " * linear_bf16(x, self.weights['wkv.weight'], compute=self.compute).float())",
        ),
    ),
)
