"""Variants of drawing a token."""

from __future__ import annotations

from conformance.faults.honest.variant import HonestVariant
from conformance.faults.patches import Edit

SAMPLING: tuple[HonestVariant, ...] = (
    HonestVariant(
        "gumbel-noise-added",
        "The largest quotient is the largest difference of logarithms (numerics.md 9): no softmax is needed.",
        changes=(
            Edit(
                "sampling.sample",
                "(probabilities / exponentials.to(compute))",
                "(logits.to(compute) / temperature - exponentials.to(compute).log())",
            ),
        ),
    ),
)
