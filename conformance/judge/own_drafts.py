"""Rules for drafts: each one follows from the one before it, so an implementation is judged by its own choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from conformance.judge.expectations import Expectation, Mode, OwnArgmax, Verdict, first_index, formed
from conformance.tensors import Tensor

Ints = npt.NDArray[np.int64]


def _ids(result: Tensor, mode: Mode, first: Ints, drafts: int, vocabulary: int) -> Ints | Verdict:
    """The draft ids [B,1+n] if they are ids at all and begin with the model's own tokens, or the verdict on them."""
    ids = formed("spec_ids", mode, result, "I32", (first.size, 1 + drafts))
    if isinstance(ids, Verdict):
        return ids
    wrong = (ids.data < 0) | (ids.data >= vocabulary)
    wrong[:, 0] = ids.data[:, 0] != first
    if not wrong.any():
        return ids.data.astype(np.int64)
    index = first_index(wrong)
    found = int(ids.data[index])
    message = f"id {found} is not in the vocabulary" if index[1] else f"begins with {found}, not the model's own token"
    return Verdict(
        "spec_ids", mode, False, int(wrong.size), int(wrong.sum()), np.inf, index, ("request", "draft"), message=message
    )


@dataclass(frozen=True)
class OwnDrafts:
    """`spec_ids` begins with the model's own token; each further id is a largest of its own `spec_logits`."""

    first: Ints
    """The model's own tokens, [B]."""
    drafts: int
    vocabulary: int

    mode: Mode = "choice"

    @property
    def taps(self) -> tuple[str, ...]:
        """Ids and the logits they were chosen from."""
        return ("spec_ids", "spec_logits")

    @property
    def golden(self) -> Mapping[str, Tensor]:
        """Nothing recorded is needed."""
        return {}

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """The first ids exactly, the others by their own logits."""
        ids = _ids(results["spec_ids"], self.mode, self.first, self.drafts, self.vocabulary)
        if isinstance(ids, Verdict):
            return ids
        logits = formed("spec_logits", self.mode, results["spec_logits"], "F32", (*ids[:, 1:].shape, self.vocabulary))
        if isinstance(logits, Verdict):
            return logits
        return OwnArgmax("spec_ids", "spec_logits").judge(
            {"spec_ids": Tensor("I32", ids[:, 1:].astype(np.int32)), "spec_logits": logits}
        )


@dataclass(frozen=True)
class AfterOwnDrafts:
    """A result whose rule depends on the implementation's own `spec_ids`: the bias of each draft is that of the last.

    `rule` makes the rule from the tokens [B,n] before each draft and from `recorded`.
    """

    tap: str
    mode: Mode
    first: Ints
    drafts: int
    vocabulary: int
    rule: Callable[[Ints, Mapping[str, Tensor]], Expectation] = field(repr=False)
    recorded: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """Recorded `spec_ids` and the recorded tap, which must satisfy the rule themselves."""

    @property
    def taps(self) -> tuple[str, ...]:
        """The tap, and the ids it follows from."""
        return (self.tap, "spec_ids")

    @property
    def golden(self) -> Mapping[str, Tensor]:
        """What was recorded."""
        return self.recorded

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """Judge the tap by the rule for the ids that came with it."""
        found = self.following(results)
        return found if isinstance(found, Verdict) else found.judge(results)

    def following(self, results: Mapping[str, Tensor]) -> Expectation | Verdict:
        """The rule for the ids among the results, or the verdict on what are none."""
        ids = _ids(results["spec_ids"], self.mode, self.first, self.drafts, self.vocabulary)
        return ids if isinstance(ids, Verdict) else self.rule(ids[:, :-1], self.recorded)
