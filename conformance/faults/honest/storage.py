"""Variants of what is kept and listed: packed caches, orders of lists, ways to find the largest scores."""

from __future__ import annotations

from conformance.faults.honest.variant import HonestVariant
from conformance.faults.patches import Edit

TIES = "How a top-k breaks ties is implementation-defined (numerics.md 6.4, topk-ties)."
SAME_SET = "The set of listed rows decides the value, not their order (numerics.md 6, item 3)."
LIBRARY = "scores.topk(count, dim=-1).indices"

STORAGE: tuple[HonestVariant, ...] = (
    HonestVariant("ties-earliest", TIES, options={"ties": "earliest"}),
    HonestVariant(
        "ties-latest",
        TIES,
        changes=(
            Edit(
                "indexer.best",
                LIBRARY,
                "scores.shape[-1] - 1 - torch.sort(scores.flip(-1), dim=-1, descending=True, stable=True)"
                ".indices[..., :count]",
            ),
        ),
    ),
    HonestVariant(
        "ties-random",
        TIES,
        changes=(Edit("indexer.best", LIBRARY, "arithmetic.random_ties(scores, count)"),),
    ),
    HonestVariant(
        "top-k-by-threshold",
        "Everything above the k-th score, then those equal to it.",
        changes=(Edit("indexer.best", LIBRARY, "arithmetic.by_threshold(scores, count)"),),
    ),
    HonestVariant(
        "carry-cleared",
        "A completed group's tokens are never read again (numerics.md 6.2): they may be emptied.",
        changes=(
            Edit(
                "compressor.Compressor._pool",
                "self.carry_kv, self.carry_score = carry_kv, carry_score",
                "self.carry_kv = carry_kv.masked_fill(((waiting + length) % self.ratio == 0)[:, None, None], 0.0)\n"
                "    self.carry_score = carry_score",
            ),
        ),
    ),
    HonestVariant(
        "experts-by-sort",
        "The order of a token's experts is free.",
        changes=(
            Edit(
                "gate.gate",
                "(scores + bias).topk(config.n_activated_experts, dim=-1).indices",
                "torch.sort(scores + bias, dim=-1, descending=True, stable=True)"
                ".indices[..., : config.n_activated_experts].sort(dim=-1).values",
            ),
        ),
    ),
    HonestVariant(
        "list-reversed",
        SAME_SET,
        changes=(
            Edit(
                "sparse_attention.sparse_attention",
                "torch.split(indices, step, dim=1)",
                "torch.split(indices.flip(-1), step, dim=1)",
            ),
        ),
    ),
    HonestVariant(
        "list-with-gaps",
        "An entry of -1 means nothing, wherever it stands (numerics.md 6, item 3).",
        changes=(
            Edit(
                "sparse_attention.sparse_attention",
                "torch.split(indices, step, dim=1)",
                "torch.split(torch.stack((torch.full_like(indices, -1), indices), dim=-1).flatten(-2), step, dim=1)",
            ),
        ),
    ),
    HonestVariant(
        "window-by-slot",
        SAME_SET,
        changes=(
            Edit(
                "window.window_indices",
                "return slots.masked_fill(listed < 0, -1).to(torch.int32)",
                "return slots.masked_fill(listed < 0, -1).sort(dim=-1, descending=True).values.to(torch.int32)",
            ),
        ),
    ),
    HonestVariant(
        "prefill-window-newest-first",
        SAME_SET,
        changes=(
            Edit(
                "window.window_indices",
                "return listed.masked_fill(listed > newest, -1).to(torch.int32)",
                "return listed.masked_fill(listed > newest, -1).flip(-1).to(torch.int32)",
            ),
        ),
    ),
    HonestVariant(
        "selection-by-score",
        SAME_SET + "  The published selection itself stays in order.",
        changes=(
            Edit(
                "attention.Attention._context",
                "selected = self.runtime.selected[request]",
                "selected = self.runtime.selected[request].flip(-1)",
            ),
        ),
    ),
    HonestVariant(
        "window-rows-packed",
        "Codes and scales are kept and dequantised when read (numerics.md 6.3, deployed storage).",
        changes=(
            Edit(
                "quantize.fake_quantize_fp8",
                "return quantized_fp8(x).bfloat16()",
                "codes, scale = quantize_fp8(x)\n    return dequantize_fp8_rows(codes, scale)",
            ),
        ),
    ),
    HonestVariant(
        "index-keys-packed",
        "Codes and scales are kept and dequantised when read (numerics.md 6.3, deployed storage).",
        changes=(
            Edit(
                "quantize.fake_quantize_fp4_e8m0",
                "values, scale = _scale_fp4_e8m0(x)\n"
                "    return join_groups(values * scale.float(), x.shape[-1]).bfloat16()",
                "codes, scale = quantize_fp4_e8m0(x)\n"
                "    values = split_groups(unpack_fp4(codes), FP4_E8M0_GROUP) * scale.float().unsqueeze(-1)\n"
                "    return join_groups(values, x.shape[-1]).bfloat16()",
            ),
        ),
    ),
    HonestVariant(
        "compressed-rows-packed",
        "Codes and scales are kept and dequantised when read (numerics.md 6.3, deployed storage).",
        changes=(
            Edit(
                "quantize.fake_quantize_fp4_e4m3",
                "values, scale = _scale_fp4_e4m3(x)\n"
                "    return join_groups(values * scale.float(), x.shape[-1]).bfloat16()",
                "codes, scale = quantize_fp4_e4m3(x)\n"
                "    values = split_groups(unpack_fp4(codes), FP4_E4M3_GROUP) * scale.float().unsqueeze(-1)\n"
                "    return join_groups(values, x.shape[-1]).bfloat16()",
            ),
        ),
    ),
    HonestVariant(
        "output-group-by-group",
        "Each group of heads has its own product (numerics.md 6, item 6).",
        changes=(
            Edit(
                "attention.attention_output",
                'torch.einsum("btgd,grd->btgr", grouped.to(compute), by_group.to(compute))',
                "torch.stack([grouped[:, :, g].to(compute) @ by_group[g].to(compute).T"
                " for g in range(config.o_groups)], dim=2)",
            ),
        ),
    ),
)
