"""Mode `choice`: selections among scores that carry an error.

A selection is honest if some scores inside the intervals, with ties broken in any way, lead to it: no entry that was
left out may have a lowest possible score above the highest possible score of one that was kept.  What does not depend
on the scores (order, uniqueness, visibility, counts) is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.judge.bounded import Bounded, Floats
from conformance.judge.expectations import Axes, Bools, Ints, Mode, OneTap, Verdict, Within, first_index, formed
from conformance.tensors import Tensor


def dominated(kept: Bools, eligible: Any, low: Floats, high: Floats) -> tuple[Any, Floats, Floats]:
    """Rows [..., C] in which an eligible entry left out must outscore one that was kept, with the two scores.

    Returns (row is wrong, best score left out at its lowest, worst score kept at its highest).
    """
    best_out = np.where(eligible & ~kept, low, -np.inf).max(axis=-1, initial=-np.inf)
    worst_in = np.where(kept, high, np.inf).min(axis=-1, initial=np.inf)
    return best_out > worst_in, best_out, worst_in


def scores_in_words(best_out: float, worst_in: float) -> str:
    """The two scores of a choice that no scores inside the intervals lead to."""
    return f" (left out: at least {best_out:.6g}, kept: at most {worst_in:.6g})"


@dataclass(frozen=True)
class Selection(OneTap):
    """The selected compressed positions, int32 [B, T, k]: ascending, then -1.

    `low` and `high` [B, T, C] hold each score's interval, -inf outside the candidates; `visible` [B, T, C] is
    causality alone.  Where the candidates hold fewer visible positions than k, the published code fills up with visible
    positions outside them and other engines do not (numerics.md 6.4, `candidate-shortfall`): both are accepted.
    """

    tap: str
    low: Floats
    high: Floats
    visible: Bools
    topk: int
    axes: Axes
    recorded: Tensor | None = None
    note: str = ""

    mode: Mode = "choice"

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """Form first, then the rule on scores."""
        batch, length, columns = self.low.shape
        width = min(self.topk, columns)
        actual = formed(self.tap, self.mode, results[self.tap], "I32", (batch, length, width))
        if isinstance(actual, Verdict):
            return actual
        chosen: Ints = actual.data.astype(np.int64)
        valid = chosen >= 0
        eligible = self.visible & (self.high > -np.inf)
        surely = self.visible & (self.low > -np.inf)
        counts = valid.sum(-1)

        wrong_range = ((chosen < -1) | (chosen >= columns)).any(-1)
        wrong_padding = (valid[..., 1:] & ~valid[..., :-1]).any(-1)
        wrong_order = (valid[..., 1:] & (chosen[..., 1:] <= chosen[..., :-1])).any(-1)
        safe = np.clip(chosen, 0, max(columns - 1, 0))
        kept = np.zeros(self.low.shape, dtype=np.bool_)
        rows = np.indices(chosen.shape)
        np.logical_or.at(kept, (rows[0], rows[1], safe), valid)
        invisible = (kept & ~self.visible).any(-1)
        fewest = np.minimum(width, surely.sum(-1))
        most = np.minimum(width, self.visible.sum(-1))
        wrong_count = (counts < fewest) | (counts > most)
        beaten, best_out, worst_in = dominated(kept, eligible, self.low, self.high)

        for wrong, what in (
            (wrong_range, "an entry is neither -1 nor a position"),
            (wrong_padding, "-1 stands before a valid entry"),
            (wrong_order, "positions are not ascending and unique"),
            (invisible, "a position that the query cannot see is selected"),
            (wrong_count, "the number of valid entries is wrong"),
            (beaten, "a position with a higher score was left out"),
        ):
            if wrong.any():
                row = first_index(wrong)
                message = f"{what} in {int(wrong.sum())} of {wrong.size} queries: got {chosen[row].tolist()}"
                if what.startswith("the number"):
                    message += f", {int(counts[row])} entries for {int(fewest[row])} visible"
                if wrong is beaten:
                    message += scores_in_words(best_out[row], worst_in[row])
                return _refused(self, wrong, row, message)
        return Verdict(self.tap, self.mode, True, int(beaten.size), axes=self.axes, note=self.note)


@dataclass(frozen=True)
class CandidateBlocks(OneTap):
    """The candidate mask, bool [B, T, C]: whole blocks, the newest visible one pinned, `topk_blocks` of them in all."""

    tap: str
    scores: Bounded
    visible_counts: Ints
    block_size: int
    topk_blocks: int
    axes: Axes
    recorded: Tensor | None = None
    note: str = ""

    mode: Mode = "choice"

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """Whole blocks, the right number of them, the pinned one, and the best of the rest."""
        actual = formed(self.tap, self.mode, results[self.tap], "BOOL", self.scores.shape)
        if isinstance(actual, Verdict):
            return actual
        mask = block_view(actual.data, self.block_size)
        low, high, pinned = pinned_maxima(self.scores, self.visible_counts, self.block_size)
        present = block_view(np.ones_like(actual.data), self.block_size)
        kept: Bools = np.any(mask, axis=-1)
        eligible = high > -np.inf
        expected = np.minimum(self.topk_blocks, eligible.sum(-1))
        beaten, best_out, worst_in = dominated(kept, eligible, low, high)
        for wrong, what in (
            ((kept[..., None] & (mask != present)).any((-1, -2)), "a block is only partly in the mask"),
            ((pinned & ~kept).any(-1), "the block of the newest visible position is missing"),
            ((kept & ~eligible).any(-1), "a block without any visible position is kept"),
            (kept.sum(-1) != expected, "the number of blocks is wrong"),
            (beaten, "a block with a higher maximum was left out"),
        ):
            if wrong.any():
                row = first_index(wrong)
                message = (
                    f"{what} in {int(wrong.sum())} of {wrong.size} queries: "
                    f"blocks {np.flatnonzero(kept[row]).tolist()}, {int(expected[row])} expected"
                )
                if wrong is beaten:
                    message += scores_in_words(best_out[row], worst_in[row])
                return _refused(self, wrong, row, message)
        return Verdict(self.tap, self.mode, True, int(beaten.size), axes=self.axes, note=self.note)


def _refused(rule: Selection | CandidateBlocks, wrong: Any, row: tuple[int, ...], message: str) -> Verdict:
    """The verdict on queries [B, T] of which those in `wrong` break a rule, `row` the first of them."""
    return Verdict(
        rule.tap,
        rule.mode,
        False,
        wrong.size,
        int(wrong.sum()),
        np.inf,
        row,
        rule.axes,
        message=message,
        note=rule.note,
    )


def pinned_maxima(scores: Bounded, visible_counts: Ints, block_size: int) -> tuple[Floats, Floats, Bools]:
    """Lowest and highest maximum of each block, and which is pinned: the newest visible one, with infinite maxima."""
    low, high = block_maxima(scores, block_size)
    newest = (visible_counts - 1) // block_size
    pinned: Bools = (np.arange(low.shape[-1]) == newest[..., None]) & (visible_counts > 0)[..., None]
    return np.where(pinned, np.inf, low), np.where(pinned, np.inf, high), pinned


def block_view(mask: Bools, block_size: int) -> Bools:
    """[..., C] padded with False to whole blocks and split: [..., blocks, block_size]."""
    padding = -mask.shape[-1] % block_size
    padded = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, padding)], constant_values=False)
    return padded.reshape(*mask.shape[:-1], -1, block_size)


def block_maxima(scores: Bounded, block_size: int) -> tuple[Floats, Floats]:
    """Lowest and highest possible maximum of each block of positions, the last one padded with -inf."""
    ends = []
    for end in (scores.low, scores.high):
        padding = -end.shape[-1] % block_size
        padded = np.pad(end, [(0, 0)] * (end.ndim - 1) + [(0, padding)], constant_values=-np.inf)
        ends.append(padded.reshape(*end.shape[:-1], -1, block_size).max(-1))
    return ends[0], ends[1]


@dataclass(frozen=True)
class GateChoice:
    """The chosen experts and their weights, judged together: int32 and fp32 [N, k], in any order.

    The choice is by `biased` scores [N, E]; the weights are judged for the experts that were chosen, so that either
    side of a tie is accepted with its own weights.
    """

    scores: Bounded
    biased: Bounded
    active: int
    route_scale: float
    axes: Axes
    recorded_weights: Tensor | None = None
    recorded_indices: Tensor | None = None
    note: str = ""

    mode: Mode = "choice"

    @property
    def taps(self) -> tuple[str, ...]:
        """Both taps, judged together."""
        return ("gate_indices", "gate_weights")

    @property
    def golden(self) -> Mapping[str, Tensor]:
        """The recorded choice, if one was given."""
        if self.recorded_indices is None or self.recorded_weights is None:
            return {}
        return {"gate_indices": self.recorded_indices, "gate_weights": self.recorded_weights}

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """The set of experts first, then each weight within its bound."""
        tokens, experts = self.scores.shape
        indices = formed("gate_indices", self.mode, results["gate_indices"], "I32", (tokens, self.active))
        if isinstance(indices, Verdict):
            return indices
        chosen: Ints = indices.data.astype(np.int64)
        kept = np.zeros((tokens, experts), dtype=np.bool_)
        in_range = (chosen >= 0) & (chosen < experts)
        np.logical_or.at(kept, (np.indices(chosen.shape)[0], np.clip(chosen, 0, experts - 1)), in_range)
        everything = np.ones_like(kept)
        beaten, best_out, worst_in = dominated(kept, everything, self.biased.low, self.biased.high)
        for wrong, what in (
            (~in_range.all(-1), "an index is not an expert"),
            (kept.sum(-1) != self.active, "an expert is chosen twice"),
            (beaten, "an expert with a higher score was left out"),
        ):
            if wrong.any():
                row = first_index(wrong)
                message = f"{what} for {int(wrong.sum())} of {tokens} tokens: got {chosen[row].tolist()}"
                if wrong is beaten:
                    message += scores_in_words(best_out[row], worst_in[row])
                return Verdict(
                    "gate_indices",
                    self.mode,
                    False,
                    tokens,
                    int(wrong.sum()),
                    np.inf,
                    row,
                    self.axes[:1],
                    message=message,
                    note=self.note,
                )
        rows = np.arange(tokens)[:, None]
        picked = self.scores[rows, chosen]
        weights = picked / (picked.sum(-1, keepdims=True) + 1e-20) * self.route_scale
        return Within("gate_weights", weights, "F32", self.axes, self.mode, note=self.note).judge(results)


@dataclass(frozen=True)
class RowSets(OneTap):
    """Lists of rows, int32 [T, n]: as sets they must be the expected ones, once each, -1 anywhere (numerics.md 6)."""

    tap: str
    expected: Sequence[Set[int]]
    width: int

    mode: Mode = "exact"

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """Compare each query's list as a set; a repeated row is wrong, because it would count twice."""
        actual = formed(self.tap, self.mode, results[self.tap], "I32", (len(self.expected), self.width))
        if isinstance(actual, Verdict):
            return actual
        wrong = []
        for query, expected in enumerate(self.expected):
            listed = [int(row) for row in actual.data[query] if row != -1]
            if len(listed) != len(set(listed)) or set(listed) != expected:
                wrong.append(query)
        count = len(self.expected)
        if not wrong:
            return Verdict(self.tap, self.mode, True, count, axes=("position",))
        query = wrong[0]
        listed = [int(row) for row in actual.data[query] if row != -1]
        missing, extra = sorted(self.expected[query] - set(listed)), sorted(set(listed) - self.expected[query])
        message = f"{len(wrong)} of {count} lists are wrong: missing {missing[:8]}, not expected {extra[:8]}"
        if len(listed) != len(set(listed)):
            message += ", a row stands twice"
        return Verdict(self.tap, self.mode, False, count, len(wrong), np.inf, (query,), ("position",), message=message)
