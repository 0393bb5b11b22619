"""Noise under deviations with which honest implementations are farther apart than the recording's.

A case that runs several layers freely is allowed what honest variants of the reference were seen to differ by.  Where a
declared deviation makes another model of it, that says nothing: what the variants differ by *with* the deviations is
measured then, but only where a port is beyond the stored floor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

from conformance.cases.case import Case
from conformance.cases.noise_floors import farthest_of
from conformance.deviations import DEVIATIONS
from conformance.faults.deviations import DeviatingReference
from conformance.faults.honest import NOISE_VARIANTS
from conformance.faults.honest.variant import HonestVariant
from conformance.faults.patches import Edit
from conformance.judge.noise import FREE_RUNNING, Allowing, Distance, allowing, with_margin

GIVEN = "of_layer = block.step(h, pre,"
NUDGED = "of_layer = block.step(arithmetic.one_step_away(h, {draw}) if layer_id == min(self.blocks) else h, pre,"
ONE_STEP_AWAY = tuple(
    HonestVariant(
        f"one-step-away-{draw}",
        "What a single rounding does: one element that the first layer is given is the next number.",
        changes=(Edit("stack.Stack.step", GIVEN, NUDGED.format(draw=draw)),),
    )
    for draw in range(1, 84, 7)
)
"""Where deviations leave little for the order of sums to change, the other variants are few samples.

With all deviations declared, one of six such draws was seen to move the logits of a whole model by 1.18 of their norm,
the others by 0.06 at most.
"""
VARIANTS = (*NOISE_VARIANTS, *ONE_STEP_AWAY)


def is_own(case: Case, declared: Sequence[str]) -> bool:
    """Whether the noise of a case is another one with these deviations."""
    return case.id.startswith(FREE_RUNNING) and any(DEVIATIONS[name].own_noise for name in declared)


def measured(case: Case, declared: Sequence[str]) -> Allowing:
    """What a case is allowed by its honest variants with these deviations; never less than by the stored floor.

    Raises:
        ConformanceError: a variant could not run the case.
    """
    with allowing(lambda tap, by_rule: Distance(1.0, 1.0, math.inf)):
        opened = {variant.name: nullcontext(DeviatingReference(declared, variant=variant)) for variant in VARIANTS}
        seen = farthest_of(case, opened)
    return lambda tap, by_rule: with_margin(seen, tap, by_rule)
