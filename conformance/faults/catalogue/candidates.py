"""Mistakes in the candidate blocks (numerics.md 6.3)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

C = "candidates"
MASK = "candidates.candidate_mask"
BLOCKS = "candidates.block_scores"
KEPT = "best(by_block.masked_fill(pinned, torch.inf), min(config.candidate_topk_blocks, blocks), ties)"

FAULTS: tuple[Fault, ...] = (
    Fault(
        C,
        "newest-not-pinned",
        "newest-block-not-pinned",
        "The block of the newest position must win by its score.",
        Edit(MASK, "by_block.masked_fill(pinned, torch.inf)", "by_block"),
    ),
    Fault(
        C,
        "pinned-beside-the-best",
        "pinned-in-addition",
        "The pinned block is not counted among the best.",
        Edit(
            MASK,
            "scatter(-1, kept_blocks, True)",
            "scatter(-1, best(by_block.masked_fill(pinned, -torch.inf), "
            "min(config.candidate_topk_blocks, blocks), ties), True) | pinned",
        ),
    ),
    Fault(
        C,
        "pinned-block-off-by-one",
        "pinned-block-of-next-position",
        "At a block's end the next block is pinned.",
        Edit(
            MASK,
            "(visible_positions(config, layer_id, positions) - 1)",
            "visible_positions(config, layer_id, positions)",
        ),
    ),
    Fault(
        C,
        "last-block-pinned",
        "newest-block-not-pinned",
        "The last block of all is pinned, not the query's newest.",
        Edit(
            MASK,
            "torch.arange(blocks) == newest.unsqueeze(-1)",
            "(torch.arange(blocks) == blocks - 1) | (newest.unsqueeze(-1) < 0)",
        ),
    ),
    Fault(
        C,
        "first-block-pinned",
        "newest-block-not-pinned",
        "The first block is pinned, as a sink.",
        Edit(MASK, "torch.arange(blocks) == newest.unsqueeze(-1)", "torch.arange(blocks) == 0 * newest.unsqueeze(-1)"),
    ),
    Fault(
        C,
        "padded-with-zero",
        "block-padded-with-zero",
        "The last block is filled up with 0 instead of -inf.",
        Edit(BLOCKS, "value=-torch.inf", "value=0.0"),
    ),
    Fault(
        C,
        "mean-of-block",
        "block-mean",
        "A block scores its mean.",
        Edit(BLOCKS, ".amax(dim=-1)", ".float().mean(dim=-1)"),
    ),
    Fault(
        C,
        "first-of-block",
        "candidate-block-score",
        "A block scores its first position.",
        Edit(BLOCKS, ".amax(dim=-1)", "[..., 0]"),
    ),
    Fault(
        C,
        "one-block-less",
        "candidate-count",
        "One block less is kept.",
        Edit(
            MASK, "min(config.candidate_topk_blocks, blocks)", "min(max(1, config.candidate_topk_blocks - 1), blocks)"
        ),
    ),
    Fault(
        C,
        "empty-blocks-kept",
        "hidden-blocks-kept",
        "Blocks without a visible position stay in the mask.",
        Edit(MASK, "kept = kept & (by_block > -torch.inf)", "pass"),
    ),
    Fault(
        C,
        "all-positions",
        "candidates-not-applied",
        "Every position is a candidate.",
        Edit(MASK, "kept = kept & (by_block > -torch.inf)", "kept = by_block > -torch.inf"),
    ),
    Fault(
        C,
        "only-visible-of-newest",
        "mask-of-positions",
        "The newest block is cut at the query's position.",
        Edit(MASK, "[..., : scores.shape[-1]]", "[..., : scores.shape[-1]] & (scores > -torch.inf)"),
    ),
    Fault(
        "attention",
        "source-restricted-by-its-own",
        "candidates-applied-to-source",
        "The source's own selection keeps to its blocks.",
        Edit(
            "attention.Attention._select",
            "selected.append(select_positions(config, layer_id, scores[-1], positions[one], ties=runtime.ties))",
            "chosen = scores[-1]\n"
            "        if config.publishes_candidates(layer_id):\n"
            "            kept = candidate_mask(config, layer_id, chosen, positions[one], ties=runtime.ties)\n"
            "            chosen = chosen.masked_fill(~kept, -torch.inf)\n"
            "        selected.append(select_positions(config, layer_id, chosen, positions[one], ties=runtime.ties))",
        ),
    ),
    Fault(
        C,
        "equal-blocks-all-kept",
        "ties-all-kept",
        "Blocks that equal the last one kept are kept as well.",
        Edit(
            MASK,
            "kept = kept & (by_block > -torch.inf)",
            "least = by_block.masked_fill(pinned, torch.inf).gather(-1, kept_blocks).amin(-1, keepdim=True)\n"
            "    kept = (kept | (by_block >= least)) & (by_block > -torch.inf)",
        ),
    ),
)
