"""Rules with other recorded values: where a deviation is declared, recordings of the published code do not hold.

What stands in for them is the reference with the same deviation, asked on the same inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from conformance.judge.choices import CandidateBlocks, GateChoice, Selection
from conformance.judge.expectations import Expectation, Ulp, Within
from conformance.judge.own_drafts import AfterOwnDrafts
from conformance.judge.own_scores import DistantScores, OwnCandidates, OwnSelection, SameSelection
from conformance.judge.propagated import Propagated
from conformance.judge.rows import OfRows
from conformance.tensors import Tensor


def rerecorded(rule: Expectation, results: Mapping[str, Tensor]) -> Expectation:
    """The rule with `results` in place of what was recorded; a rule that holds no recording is returned as it is.

    Raises:
        KeyError: a recorded tap is not among the results.
    """
    if not rule.golden:
        return rule
    if isinstance(rule, Propagated | Within | Ulp | Selection | CandidateBlocks):
        return replace(rule, recorded=results[rule.tap])
    if isinstance(rule, OfRows):
        picked = {tap: results[tap][:, list(rule.rows)] for tap in rule.golden}
        return replace(rule, rule=rerecorded(rule.rule, picked))
    if isinstance(rule, DistantScores):
        return replace(rule, rule=replace(rule.rule, recorded=results[rule.rule.tap]))
    if isinstance(rule, SameSelection):
        inner = replace(rule.rule, recorded=results[rule.rule.tap])
        return replace(rule, rule=inner, selected=results["selected"])
    if isinstance(rule, OwnSelection | OwnCandidates | AfterOwnDrafts):
        return replace(rule, recorded={tap: results[tap] for tap in rule.golden})
    if isinstance(rule, GateChoice):
        weights, indices = results["gate_weights"], results["gate_indices"]
        return replace(rule, recorded_weights=weights, recorded_indices=indices)
    raise TypeError(f"{type(rule).__name__} holds recorded values in a way that is not known")
