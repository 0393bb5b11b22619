"""Mistakes at the end of the draft head, and in how its blocks are put together (numerics.md 10)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

D = "dspark"
TOKENS = "dspark.draft_tokens"
STEP = "dspark.DSpark.step"
CONFIDENCE = "dspark.draft_confidence"

FAULTS: tuple[Fault, ...] = (
    Fault(
        D,
        "markov-tables-swapped",
        "draft-markov-table",
        "The Markov head's output rows are taken for its embedding.",
        Edit("dspark.markov_embedding", "markov_head.embed.weight", "markov_head.head.weight"),
    ),
    Fault(
        D,
        "markov-row-off-by-one",
        "draft-markov-table",
        "Rows of the Markov embedding begin at id 1.",
        Edit("dspark.markov_embedding", "previous_ids)", "(previous_ids - 1).clamp(min=0))"),
    ),
    Fault(
        D,
        "markov-in-bf16",
        "draft-markov-in-bf16",
        "The Markov head's weights are cast to bf16.",
        Edit(
            "dspark.markov_bias", 'weights["markov_head.head.weight"]', 'weights["markov_head.head.weight"].bfloat16()'
        ),
    ),
    Fault(
        D,
        "confidence-squashed",
        "draft-confidence-squashed",
        "A sigmoid is applied to the confidence.",
        Edit(CONFIDENCE, "compute=compute).squeeze(-1)", "compute=compute).squeeze(-1).sigmoid()"),
    ),
    Fault(
        D,
        "confidence-parts-swapped",
        "draft-confidence-parts",
        "The Markov embedding comes first.",
        Edit(
            CONFIDENCE,
            "(hidden, markov_embedding(weights, previous_ids))",
            "(markov_embedding(weights, previous_ids), hidden)",
        ),
    ),
    Fault(
        D,
        "confidence-of-hidden-only",
        "draft-confidence-parts",
        "The Markov embedding takes no part.",
        Edit(
            CONFIDENCE,
            "(hidden, markov_embedding(weights, previous_ids))",
            "(hidden, 0 * markov_embedding(weights, previous_ids))",
        ),
    ),
    Fault(
        D,
        "markov-missing",
        "draft-markov-missing",
        "Drafts are chosen without the Markov head.",
        Edit(TOKENS, "+ markov_bias(weights, previous, compute=compute)", ""),
    ),
    Fault(
        D,
        "markov-of-newest-token",
        "draft-markov-first-token",
        "All drafts are conditioned on the model's token.",
        Edit(TOKENS, "markov_bias(weights, previous,", "markov_bias(weights, ids[0],"),
    ),
    Fault(
        D,
        "markov-after-choice",
        "draft-markov-late",
        "The bias is added after the draft was chosen.",
        Edit(TOKENS, "ids.append(greedy(logits[-1]))", "ids.append(greedy(base[:, draft]))"),
    ),
    Fault(
        D,
        "markov-added-twice",
        "draft-markov-late",
        "Logits that hold the bias already get it again before the choice.",
        Edit(TOKENS, "greedy(logits[-1])", "greedy(2 * logits[-1] - base[:, draft])"),
    ),
    Fault(
        D,
        "confidence-of-normed",
        "draft-confidence-normed",
        "Confidence is projected from the normed hidden state.",
        Edit(TOKENS, "draft_confidence(weights, hidden[:, draft],", "draft_confidence(weights, normed[:, draft],"),
    ),
    Fault(
        D,
        "confidence-of-own-token",
        "draft-confidence-own-token",
        "Confidence is conditioned on the draft itself.",
        Edit(
            TOKENS,
            "draft_confidence(weights, hidden[:, draft], previous,",
            "draft_confidence(weights, hidden[:, draft], greedy(logits[-1]),",
        ),
    ),
    Fault(
        D,
        "final-norm-missing",
        "draft-final-norm",
        "The draft head's final norm is missing.",
        Edit(TOKENS, 'rms_norm(hidden, weights["norm.weight"], config.norm_eps, compute=compute)', "hidden"),
    ),
    Fault(
        D,
        "ids-without-own-token",
        "draft-ids-shifted",
        "The ids begin with the first draft, and a last one is repeated.",
        Edit(TOKENS, "torch.stack(ids, dim=1)", "torch.stack([*ids[1:], ids[-1]], dim=1)"),
    ),
    Fault(
        D,
        "last-block-left-out",
        "draft-blocks-left-out",
        "The last draft block is not run.",
        Edit(
            STEP,
            'h, pre = of_layer["h_out"], of_layer["pre_out"]',
            'h, pre = (of_layer["h_out"], of_layer["pre_out"]) if layer_id < max(self.blocks) else (h, pre)',
        ),
    ),
    Fault(
        D,
        "blocks-side-by-side",
        "draft-blocks-left-out",
        "Every block gets the drafts' embedding.",
        Edit(
            STEP,
            "of_layer = block.step(h, pre, main_x, start_pos)",
            "of_layer = block.step(embedded.unsqueeze(2).repeat(1, 1, config.hc_mult, 1), pre, main_x, start_pos)",
        ),
    ),
    Fault(
        D,
        "main-x-normed-per-block",
        "draft-main-x-per-block",
        "Each later block norms main_x again.",
        Edit(
            STEP,
            "of_layer = block.step(h, pre, main_x, start_pos)",
            'main_x = rms_norm(main_x, self.first["main_norm.weight"], config.norm_eps)\n'
            "        of_layer = block.step(h, pre, main_x, start_pos)",
        ),
    ),
    Fault(
        D,
        "head-tied",
        "draft-head-own",
        "The embedding stands in for the shared head.",
        Edit(STEP, 'self.weights["head.weight"]', 'self.weights["embed.weight"]'),
    ),
    Fault(
        D,
        "embedding-of-markov-head",
        "draft-head-own",
        "Drafts are embedded with the shared head.",
        Edit(STEP, 'self.weights["embed.weight"]', 'self.weights["head.weight"]'),
    ),
    Fault(
        D,
        "first-mix-average",
        "draft-first-mix",
        "The first draft block reads the average of the streams, whose first is the only one written.",
        Edit(
            STEP,
            "embedded.unsqueeze(2).expand(-1, -1, config.hc_mult, -1).contiguous()",
            "torch.nn.functional.pad(embedded.unsqueeze(2), (0, 0, 0, config.hc_mult - 1))",
        ),
    ),
)
