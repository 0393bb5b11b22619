"""Variants of the draft head and of what is left where no result depends on it."""

from __future__ import annotations

from conformance.faults.honest.variant import HonestVariant
from conformance.faults.patches import Edit

DRAFTS: tuple[HonestVariant, ...] = (
    HonestVariant(
        "drafts-listed-first",
        "The order of listed rows is free (numerics.md 6, item 3): drafts may stand before the ring.",
        changes=(Edit("dspark.draft_indices", "torch.cat((listed, own), dim=1)", "torch.cat((own, listed), dim=1)"),),
    ),
    HonestVariant(
        "markov-bias-by-table",
        "The bias of every token may be made beforehand and looked up.",
        changes=(
            Edit(
                "dspark.markov_bias",
                "embedding = markov_embedding(weights, previous_ids)\n"
                '    return linear_fp32(embedding, weights["markov_head.head.weight"], compute=compute)',
                'table = linear_fp32(weights["markov_head.embed.weight"], weights["markov_head.head.weight"], '
                "compute=compute)\n    return table[previous_ids.long()]",
            ),
        ),
    ),
    HonestVariant(
        "confidence-in-two-sums",
        "The projection of two parts put together is the sum of their projections, in any order.",
        changes=(
            Edit(
                "dspark.draft_confidence",
                'return linear_fp32(features, weights["confidence_head.proj.weight"], compute=compute).squeeze(-1)',
                'projection, width = weights["confidence_head.proj.weight"], hidden.shape[-1]\n'
                "    of_markov = linear_fp32(features[:, width:], projection[:, width:], compute=compute)\n"
                "    of_hidden = linear_fp32(features[:, :width], projection[:, :width], compute=compute)\n"
                "    return (of_markov + of_hidden).squeeze(-1)",
            ),
        ),
    ),
    HonestVariant(
        "rejected-rows-left-unlisted",
        "A slot that is not listed yet may hold anything (numerics.md 10.1), such as the row of a rejected position.",
        changes=(
            Edit(
                "dspark.DraftAttention.roll_back",
                "self.window = rolled_back_ring(self.config, self._last_call, end)",
                "with_rejected, self.window = self.window, rolled_back_ring(self.config, self._last_call, end)\n"
                "    unlisted = torch.arange(self.config.window_size) >= end.unsqueeze(1)\n"
                "    self.window = torch.where(unlisted.unsqueeze(-1), with_rejected, self.window)",
            ),
        ),
    ),
)
