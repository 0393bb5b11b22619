"""Mistakes in the indexer (numerics.md 6.3)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

I = "indexer"  # noqa: E741
KEYS = "indexer.index_keys"
QUERIES = "indexer.index_queries"
WEIGHTS = "indexer.index_weights"
SCORES = "indexer.index_scores"
HEADS = "indexer._score_heads"
SELECT = "indexer.select_positions"
TURNED_KEYS = "rotate(config, layer_id, keys, positions, compute=compute)"
TURNED_QUERIES = "rotate(config, layer_id, queries, positions, compute=compute)"
PROJECTED = 'linear_bf16(x, weights["indexer.weights_proj.weight"], compute=compute)'
DOTS = "to_bf16(queries.to(compute) @ keys.to(compute).unsqueeze(1).transpose(-1, -2))"
FACTOR = "config.index_head_dim**-0.5 * config.index_n_heads**-0.5"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "attention",
        "keys-from-cached-rows",
        "index-keys-from-rotated",
        "Keys are made of the rows as cached, already turned.",
        Edit(
            "attention.Attention._compress",
            "self.weights, latent, row * ratio",
            'self.weights, taps["compressed_rows"], row * ratio',
        ),
    ),
    Fault(
        "attention",
        "keys-by-pool-index",
        "row-turned-by-group-number",
        "A key turns by its own index instead of its first token's.",
        Edit("attention.Attention._compress", "self.weights, latent, row * ratio", "self.weights, latent, row"),
    ),
    Fault(
        "attention",
        "keys-by-last-token",
        "row-turned-by-last-token",
        "A key turns by the position of its group's last token.",
        Edit(
            "attention.Attention._compress",
            "self.weights, latent, row * ratio",
            "self.weights, latent, row * ratio + ratio - 1",
        ),
    ),
    Fault(
        I,
        "keys-not-normed",
        "index-key-norm",
        "Keys are not normed.",
        Edit(KEYS, 'keys = rms_norm(keys, weights["indexer.k_norm.weight"], config.norm_eps, compute=compute)', "pass"),
    ),
    Fault(I, "keys-not-rotated", "index-rotation", "Keys are not rotated.", Edit(KEYS, TURNED_KEYS, "keys")),
    Fault(
        I,
        "keys-not-quantised",
        "index-not-quantised",
        "Keys are kept in bf16.",
        Edit(KEYS, f"fake_quantize_fp4_e8m0({TURNED_KEYS})", TURNED_KEYS),
    ),
    Fault(
        I,
        "keys-in-8-bits",
        "index-not-quantised",
        "Keys are quantised to FP8 like the window's rows.",
        Edit(
            "indexer.index_keys",
            f"fake_quantize_fp4_e8m0({TURNED_KEYS})",
            f"__import__('reference.quantize').quantize.fake_quantize_fp8({TURNED_KEYS})",
        ),
    ),
    Fault(
        I,
        "keys-in-format-of-rows",
        "fp4-formats-swapped",
        "Keys get the FP4 format of compressed rows.",
        Edit(
            KEYS,
            f"fake_quantize_fp4_e8m0({TURNED_KEYS})",
            f"__import__('reference.quantize').quantize.fake_quantize_fp4_e4m3({TURNED_KEYS})",
        ),
    ),
    Fault(
        I,
        "queries-not-rotated",
        "index-rotation",
        "Queries are not rotated.",
        Edit(QUERIES, TURNED_QUERIES, "queries"),
    ),
    Fault(
        I,
        "queries-not-quantised",
        "index-not-quantised",
        "Queries are kept in bf16.",
        Edit(QUERIES, f"fake_quantize_fp4_e8m0({TURNED_QUERIES})", TURNED_QUERIES),
    ),
    Fault(
        I,
        "queries-through-hadamard",
        "hadamard-kept",
        "Queries pass the Hadamard transform of an earlier model.",
        Edit(
            QUERIES,
            f"fake_quantize_fp4_e8m0({TURNED_QUERIES})",
            f"fake_quantize_fp4_e8m0(arithmetic.hadamard({TURNED_QUERIES}))",
        ),
    ),
    Fault(
        I,
        "queries-heads-transposed",
        "heads-transposed",
        "Features and heads of the projection are exchanged.",
        Edit(
            QUERIES,
            "torch.unflatten(queries, -1, (config.index_n_heads, config.index_head_dim))",
            "torch.unflatten(queries, -1, (config.index_head_dim, config.index_n_heads)).mT",
        ),
    ),
    Fault(
        I,
        "weights-rounded-once",
        "head-weights-rounded-once",
        "Head weights are not rounded before the factor.",
        Edit(WEIGHTS, PROJECTED, 'x.to(compute) @ weights["indexer.weights_proj.weight"].to(compute).T'),
    ),
    Fault(
        I,
        "weights-not-rounded",
        "head-weights-rounded-once",
        "Head weights are not rounded after the factor.",
        Edit(WEIGHTS, "to_bf16(projected.to(compute) * factor)", "projected.to(compute) * factor"),
    ),
    Fault(
        I,
        "weights-without-heads",
        "head-weights-scale",
        "The factor of the number of heads is missing.",
        Edit(WEIGHTS, FACTOR, "config.index_head_dim**-0.5"),
    ),
    Fault(
        I,
        "weights-without-factor",
        "head-weights-scale",
        "Head weights are not scaled.",
        Edit(WEIGHTS, FACTOR, "1.0"),
    ),
    Fault(
        I,
        "relu-missing",
        "relu-missing",
        "Negative products count.",
        Edit(HEADS, "torch.relu(dots)", "dots"),
    ),
    Fault(
        I,
        "relu-after-sum",
        "relu-after-sum",
        "The ReLU is taken of the sum over heads.",
        Edit(
            HEADS,
            "weighted = to_bf16(torch.relu(dots).to(compute) * head_weights.to(compute).unsqueeze(-1))\n"
            "    return to_bf16(weighted.to(compute).sum(dim=2))",
            "weighted = to_bf16(dots.to(compute) * head_weights.to(compute).unsqueeze(-1))\n"
            "    return to_bf16(torch.relu(weighted.to(compute).sum(dim=2)))",
        ),
    ),
    Fault(
        I,
        "relu-after-weight",
        "relu-after-weight",
        "The ReLU is taken after the head's weight.",
        Edit(
            HEADS,
            "to_bf16(torch.relu(dots).to(compute) * head_weights.to(compute).unsqueeze(-1))",
            "torch.relu(to_bf16(dots.to(compute) * head_weights.to(compute).unsqueeze(-1)))",
        ),
    ),
    Fault(
        I,
        "head-weights-ignored",
        "index-head-weights",
        "All heads weigh the same.",
        Edit(
            HEADS,
            "head_weights.to(compute).unsqueeze(-1)",
            "head_weights.to(compute).mean(-1, keepdim=True).unsqueeze(-1)",
        ),
    ),
    Fault(
        I,
        "dots-not-rounded",
        "dot-not-rounded",
        "The dot products are not rounded to bf16.",
        Edit(HEADS, DOTS, DOTS.removeprefix("to_bf16")),
    ),
    Fault(
        I,
        "products-not-rounded",
        "weighted-not-rounded",
        "The weighted products are not rounded to bf16.",
        Edit(
            HEADS,
            "to_bf16(torch.relu(dots).to(compute) * head_weights.to(compute).unsqueeze(-1))",
            "torch.relu(dots).to(compute) * head_weights.to(compute).unsqueeze(-1)",
        ),
    ),
    Fault(
        I,
        "sum-in-bf16",
        "heads-added-in-bf16",
        "The sum over heads is kept in bf16.",
        Edit(HEADS, "weighted.to(compute).sum(dim=2)", "arithmetic.bf16_sum(weighted.to(compute), 2)"),
    ),
    Fault(
        I,
        "scores-truncated",
        "bf16-truncated",
        "Scores are cut to bf16 instead of rounded.",
        Edit(HEADS, "to_bf16(weighted.to", "arithmetic.truncate(weighted.to"),
    ),
    Fault(
        I,
        "own-group-hidden",
        "visible-too-late",
        "A token that completes a group does not see it.",
        Edit("indexer.visible_positions", "(positions + 1)", "positions"),
    ),
    Fault(
        I,
        "next-group-visible",
        "visible-too-early",
        "A token sees a group that it does not complete.",
        Edit("indexer.visible_positions", "(positions + 1)", "(positions + 2)"),
    ),
    Fault(
        I,
        "causality-missing",
        "candidates-show-invisible",
        "Scores of positions that are not visible are kept.",
        Edit(
            SCORES,
            "scores.masked_fill(~visible, -torch.inf)",
            "scores if candidates is None else scores.masked_fill(~candidates, -torch.inf)",
        ),
    ),
    Fault(
        I,
        "invisible-scores-zero",
        "index-mask-value",
        "Positions that are not visible score 0 instead of -inf.",
        Edit(SCORES, "scores.masked_fill(~visible, -torch.inf)", "scores.masked_fill(~visible, 0.0)"),
    ),
    Fault(
        I,
        "candidates-ignored",
        "candidates-not-applied",
        "Re-indexing layers score every position.",
        Edit(SCORES, "if candidates is not None:", "if candidates is not None and keys.shape[1] == 0:"),
    ),
    Fault(
        I,
        "selection-not-sorted",
        "not-sorted",
        "Selected positions come by score.",
        Edit(SELECT, ".sort(dim=-1).values", ""),
    ),
    Fault(
        I,
        "selection-of-worst",
        "ascending-scores-selected",
        "The smallest scores are kept.",
        Edit(SELECT, "best(scores,", "best(-scores,"),
    ),
    Fault(
        I,
        "selection-most-recent",
        "best-not-selected",
        "The most recent positions are kept, whatever their scores.",
        Edit(SELECT, "best(scores,", "best(torch.arange(scores.shape[-1]).masked_fill(torch.isneginf(scores), -1),"),
    ),
    Fault(
        I,
        "selection-one-worse",
        "best-not-selected",
        "The best position is left out for the one after the last.",
        Edit(
            SELECT,
            "best(scores, min(config.index_topk, scores.shape[-1]), ties)",
            "best(scores, min(config.index_topk + 1, scores.shape[-1]), ties)"
            "[..., -min(config.index_topk, scores.shape[-1]) :]",
        ),
    ),
    Fault(
        I,
        "padding-not-marked",
        "invisible-selected",
        "Selected positions that are not visible stay in the list.",
        Edit(SELECT, "selected.masked_fill(selected >= visible, -1)", "selected"),
    ),
    Fault(
        I,
        "padding-with-zero",
        "padding-not-minus-one",
        "Unused entries name position 0 instead of none.",
        Edit(SELECT, "selected.masked_fill(selected >= visible, -1)", "selected.masked_fill(selected >= visible, 0)"),
    ),
    Fault(
        I,
        "keys-rounded-less",
        "key-roundings-fused",
        "The key's projection is not rounded before its norm.",
        Edit(
            KEYS,
            'linear_bf16(latent, weights["indexer.wk.weight"], compute=compute)',
            'latent.to(compute) @ weights["indexer.wk.weight"].to(compute).T',
        ),
    ),
    Fault(
        I,
        "keys-beyond-2048-lost",
        "keys-beyond-2048-lost",
        "The kernel scores the first 2048 keys.",
        Edit(
            SCORES,
            "scores.masked_fill(~visible, -torch.inf)",
            "scores.masked_fill(~visible | (torch.arange(keys.shape[1]) >= 2048), -torch.inf)",
        ),
    ),
    Fault(
        I,
        "one-position-less",
        "topk-off-by-one",
        "One position less than the top-k is kept.",
        Edit(SELECT, "min(config.index_topk, scores.shape[-1])", "min(config.index_topk - 1, scores.shape[-1])"),
    ),
    Fault(
        I,
        "scores-in-fp16",
        "scores-narrowed",
        "Scores are compared in fp16.",
        Edit(SELECT, "best(scores,", "best(scores.half(),"),
    ),
    Fault(
        I,
        "empty-selection-crashes",
        "empty-selection-crashes",
        "The top-k of no position at all is an error.",
        Edit(SELECT, "selected = best(", "assert scores.shape[-1]\n    selected = best("),
    ),
    Fault(
        I,
        "requests-mixed",
        "requests-mixed",
        "All requests score the keys of the first.",
        Edit(HEADS, "keys.to(compute).unsqueeze(1)", "keys[:1].to(compute).unsqueeze(1)"),
    ),
)
