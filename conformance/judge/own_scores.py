"""Selections judged by the scores that came with them, and those scores by their distance from a recording.

At the released widths a score's interval, carried through two projections and an FP4 rounding, is wider than the scores
are apart.  So what is chosen is judged exactly against the implementation's own scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from conformance.judge.bounded import Bounded
from conformance.judge.choices import CandidateBlocks, Selection
from conformance.judge.deviations import score_format
from conformance.judge.expectations import Bools, Ints, Mode, Verdict, first_index, formed
from conformance.judge.propagated import Propagated
from conformance.tensors import Tensor

SCORE_AXES = ("request", "position", "compressed position")
QUERY_AXES = ("request", "position")


@dataclass(frozen=True)
class OwnSelection:
    """The selected positions are a top-k of the index scores beside them, whatever those are."""

    visible: Bools
    topk: int
    recorded: Mapping[str, Tensor]

    tap = "selected"
    scores = "index_score"
    mode: Mode = "choice"

    @property
    def taps(self) -> tuple[str, ...]:
        """Selection and scores."""
        return (self.tap, self.scores)

    @property
    def golden(self) -> Mapping[str, Tensor]:
        """Both as recorded."""
        return self.recorded

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """The rule for selections with scores that have no error."""
        scores = formed(self.tap, self.mode, results[self.scores], score_format().name, self.visible.shape)
        if isinstance(scores, Verdict):
            return scores
        values = scores.values()
        return Selection(self.tap, values, values, self.visible, self.topk, QUERY_AXES).judge(results)


@dataclass(frozen=True)
class OwnCandidates:
    """The candidate blocks are the best by the index scores beside them."""

    visible_counts: Ints
    columns: int
    block_size: int
    topk_blocks: int
    recorded: Mapping[str, Tensor]

    tap = "candidates"
    scores = "index_score"
    mode: Mode = "choice"

    @property
    def taps(self) -> tuple[str, ...]:
        """Mask and scores."""
        return (self.tap, self.scores)

    @property
    def golden(self) -> Mapping[str, Tensor]:
        """Both as recorded."""
        return self.recorded

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """The rule for candidates with scores that have no error."""
        shape = (*self.visible_counts.shape, self.columns)
        scores = formed(self.tap, self.mode, results[self.scores], score_format().name, shape)
        if isinstance(scores, Verdict):
            return scores
        exact = Bounded.exact(scores.values())
        rule = CandidateBlocks(self.tap, exact, self.visible_counts, self.block_size, self.topk_blocks, QUERY_AXES)
        return rule.judge(results)


@dataclass(frozen=True)
class DistantScores:
    """Index scores within a noise floor of the recorded ones where both are finite; -inf where nothing is visible.

    `decided` marks the positions whose visibility no honest rounding changes; candidates that are tied are not.
    """

    rule: Propagated
    decided: Bools

    @property
    def taps(self) -> tuple[str, ...]:
        """The scores."""
        return self.rule.taps

    @property
    def mode(self) -> Mode:
        """Measured, as the rule within."""
        return self.rule.mode

    @property
    def golden(self) -> Mapping[str, Tensor]:
        """The recorded scores."""
        return self.rule.golden

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """Masked positions first, then the distance of the rest."""
        recorded = self.rule.recorded
        actual = formed(self.rule.tap, self.mode, results[self.rule.tap], recorded.dtype, recorded.shape)
        if isinstance(actual, Verdict):
            return actual
        got, expected = actual.values(), recorded.values()
        wrong = self.decided & (np.isneginf(got) != np.isneginf(expected))
        if wrong.any():
            index = first_index(wrong)
            message = f"{int(wrong.sum())} of {wrong.size} positions are visible that must not be, or the reverse"
            return Verdict(
                self.rule.tap, self.mode, False, wrong.size, int(wrong.sum()), np.inf, index, SCORE_AXES,
                float(got[index]), float(expected[index]), message=message,
            )  # fmt: skip
        masked = np.isneginf(got) | np.isneginf(expected)
        finite = replace(self.rule, recorded=_zeroed(recorded, masked))
        return finite.judge({self.rule.tap: _zeroed(actual, masked)})


@dataclass(frozen=True)
class SameSelection:
    """A rule for attention outputs where the selection beside them is the recorded one; other queries are left out."""

    rule: Propagated
    selected: Tensor

    @property
    def taps(self) -> tuple[str, ...]:
        """Output and selection."""
        return (self.rule.tap, "selected")

    @property
    def mode(self) -> Mode:
        """That of the rule within."""
        return self.rule.mode

    @property
    def golden(self) -> Mapping[str, Tensor]:
        """Both as recorded."""
        return {self.rule.tap: self.rule.recorded, "selected": self.selected}

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """The rule on the queries with equal selections; passes where there are none."""
        recorded = self.rule.recorded
        chosen = formed(self.rule.tap, self.mode, results["selected"], self.selected.dtype, self.selected.shape)
        actual = formed(self.rule.tap, self.mode, results[self.rule.tap], recorded.dtype, recorded.shape)
        if isinstance(chosen, Verdict):
            return chosen
        if isinstance(actual, Verdict):
            return actual
        equal = (chosen.data == self.selected.data).all((0, 2))
        return replace(self.rule, recorded=recorded[:, equal]).judge({self.rule.tap: actual[:, equal]})


def _zeroed(tensor: Tensor, masked: Bools) -> Tensor:
    return Tensor(tensor.dtype, np.where(masked, np.zeros_like(tensor.data), tensor.data))
