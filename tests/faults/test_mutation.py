"""Mutants: what they change in a function, and what the cases make of some."""

from __future__ import annotations

import copy
import inspect
import json
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from cli_runs import outcome_of

import reference.norm
from conformance.faults import mutants_command
from conformance.faults.mutants_command import MutantOptions, accepted, chosen_mutants, sample, unchanged
from conformance.faults.mutants_run import (
    HELPERS,
    Fate,
    MutantWorkbench,
    OutOfTime,
    all_mutants,
    compiled,
    order,
    put,
    within,
)
from conformance.faults.mutation import Mutant, mutants
from conformance.faults.patches import Replace, patched
from conformance.faults.prepared import PreparedCase
from conformance.fixtures import Fixtures
from conformance.interface import COMPONENTS

ROOT = Path(__file__).parents[2]

MODULE = '''"""A module."""

LIMIT = 3


@cached(2)
def clamp(x: int, low: int = 0) -> int:
    """A text."""
    if x < 0:
        raise ValueError(f"{x + 1} is too low")
    assert x != 5
    return max(x, low) if low is not None else -x


class Row:
    size: int = 4

    def tail(self, rows: list[int], n: int) -> list[int]:
        """µ: a text."""
        total: float = 0.5
        n -= self.skip(n, exact=True, by=n)  # µ
        return torch.exp(rows[n:], dim=-1).to(total)[:-1]

    def pairs(self, *rows):
        # µ
        while "µ" in rows or not self.size: rows = zip(*rows, strict=True)
        if rows:
            self.size = (rows[0] +
                         rows[1])
        return rows
'''

EXPECTED = [
    ("made.clamp:12/1", "the condition is always true", "return (max(x, low))"),
    ("made.clamp:12/2", "the condition is always false", "return (-x)"),
    ("made.clamp:12/3", "is not becomes is", "return max(x, low) if ((low) is (None)) else -x"),
    ("made.clamp:12/4", "max becomes min", "return (min(x, low)) if low is not None else -x"),
    ("made.clamp:12/5", "- dropped", "return max(x, low) if low is not None else (x)"),
    ("made.Row.tail:20/1", "0.5 becomes 0.51", "total: float = (0.51)"),
    ("made.Row.tail:20/2", "0.5 becomes 0.25", "total: float = (0.25)"),
    ("made.Row.tail:21/1", "-= becomes +=", "n += self.skip(n, exact=True, by=n)  # µ"),
    ("made.Row.tail:21/2", "statement deleted", "pass  # µ"),
    ("made.Row.tail:21/3", ".skip() dropped", "n -= (self)  # µ"),
    ("made.Row.tail:21/4", "by= dropped", "n -= (self.skip(n, exact=True))  # µ"),
    ("made.Row.tail:21/5", "True becomes False", "n -= self.skip(n, exact=(False), by=n)  # µ"),
    ("made.Row.tail:22/1", "exp() dropped", "return (rows[n:]).to(total)[:-1]"),
    ("made.Row.tail:22/2", "start of the slice dropped", "return torch.exp(rows[:], dim=-1).to(total)[:-1]"),
    ("made.Row.tail:22/3", "1 becomes 2", "return torch.exp(rows[n:], dim=-(2)).to(total)[:-1]"),
    ("made.Row.tail:22/4", "1 becomes 0", "return torch.exp(rows[n:], dim=-(0)).to(total)[:-1]"),
    ("made.Row.tail:22/5", "end of the slice dropped", "return torch.exp(rows[n:], dim=-1).to(total)[:]"),
    ("made.Row.tail:22/6", "1 becomes 2", "return torch.exp(rows[n:], dim=-1).to(total)[:-(2)]"),
    ("made.Row.tail:22/7", "1 becomes 0", "return torch.exp(rows[n:], dim=-1).to(total)[:-(0)]"),
    (
        "made.Row.pairs:26/1",
        "or becomes and",
        "while (('µ' in rows) and (not self.size)): rows = zip(*rows, strict=True)",
    ),
    (
        "made.Row.pairs:26/2",
        "in becomes not in",
        "while (('µ') not in (rows)) or not self.size: rows = zip(*rows, strict=True)",
    ),
    ("made.Row.pairs:26/3", "not dropped", 'while "µ" in rows or (self.size): rows = zip(*rows, strict=True)'),
    ("made.Row.pairs:26/4", "statement deleted", 'while "µ" in rows or not self.size: pass'),
    ("made.Row.pairs:27/1", "the condition is always true", "if (True):"),
    ("made.Row.pairs:27/2", "the condition is always false", "if (False):"),
    ("made.Row.pairs:28/1", "statement deleted", "pass"),
    ("made.Row.pairs:28/2", "+ becomes -", "self.size = (((rows[0]) - (rows[1])))"),
    ("made.Row.pairs:28/3", "0 becomes 1", "self.size = (rows[(1)] +"),
    ("made.Row.pairs:28/4", "0 becomes -1", "self.size = (rows[(-1)] +"),
    ("made.Row.pairs:29/1", "1 becomes 2", "rows[(2)])"),
    ("made.Row.pairs:29/2", "1 becomes 0", "rows[(0)])"),
]
"""Ids, what was changed, and the changed line, of all mutants of `MODULE`: none of its refusal, its assertion, its
defaults, its types and its texts."""

NORM = ("norm/rms/block-inputs", "norm/rms-vectors/huge-values")
"""Two cases in the order in which they are tried: the first is a smoke case."""


@pytest.fixture(scope="module")
def bench() -> MutantWorkbench:
    return MutantWorkbench(None)


def few(bench: MutantWorkbench, *ids: str) -> MutantWorkbench:
    """The same bench with these cases only."""
    smaller = copy.copy(bench)
    smaller.cases = {case_id: bench.cases[case_id] for case_id in ids}
    return smaller


def mutant_of(component: str, change: str, text: str) -> Mutant:
    (found,) = [m for m in all_mutants(component) if m.change == change and text in m.text]
    return found


def written(target: str, source: str) -> Mutant:
    """A mutant that no rule makes."""
    return Mutant(target, 1, 1, "written by hand", "", source)


RIGHT_BUT_DIFFERENT = written(
    "norm.rms_norm",
    "def rms_norm(x, weight, eps, *, compute=torch.float32):\n"
    "    x = x.double()\n"
    "    return to_bf16(x * weight.double() * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps))\n",
)
"""In float64, and the product with the weight comes first: other roundings, within the bounds."""


def test_all_mutants_of_a_module() -> None:
    lines = [line.strip() for line in MODULE.splitlines()]
    found = mutants("made", MODULE)
    changed = [next(line.strip() for line in m.source.splitlines() if line.strip() not in lines) for m in found]
    assert [(m.id, m.change, line) for m, line in zip(found, changed, strict=True)] == EXPECTED
    assert all(m.text == lines[m.line - 1] for m in found)


def test_the_source_of_a_mutant_is_the_whole_function() -> None:
    assert mutants("made", MODULE)[3].source == (
        '@cached(2)\ndef clamp(x: int, low: int = 0) -> int:\n    """A text."""\n    if x < 0:\n'
        '        raise ValueError(f"{x + 1} is too low")\n    assert x != 5\n'
        "    return (min(x, low)) if low is not None else -x\n"
    )


def test_mutants_that_mean_the_same_are_one() -> None:
    exchanged = mutants("made", "def f(x):\n    return x.where(x, x) + max(x, 1.0)\n")
    assert "arguments of where exchanged" not in [m.change for m in exchanged]
    assert "arguments of max exchanged" not in [m.change for m in exchanged]
    assert [m.source for m in mutants("made", "def f(x):\n    return x if x else x\n")] == [
        "def f(x):\n    return (x)\n"
    ]
    assert "arguments of where exchanged" in [m.change for m in mutants("made", "def f(x, y):\n    x.where(x, y)\n")]


def test_every_module_of_the_reference_belongs_to_a_component() -> None:
    modules = {path.stem for path in (ROOT / "reference").glob("*.py")}
    assert modules - set(COMPONENTS) - set(HELPERS) == {"__init__", "parallel"}
    assert set(HELPERS.values()) <= set(COMPONENTS)
    assert {m.target.partition(".")[0] for m in all_mutants("vision")} == {"vision", "images"}


def test_every_mutant_of_the_reference_can_be_applied() -> None:
    every = [m for component in COMPONENTS for m in all_mutants(component)]
    assert len({m.id for m in every}) == len(every) > 2000
    for mutant in every:
        compiled(mutant)
    for mutant in {m.target: m for m in every}.values():
        with patched([Replace(mutant.target, compiled(mutant))]):
            pass


def test_a_mutant_is_killed(bench: MutantWorkbench) -> None:
    fate = put(few(bench, *NORM), mutant_of("norm", "mean becomes sum", "rsqrt"), 5)
    assert fate.by == NORM[0]
    assert (fate.changed, fate.tried, fate.left, fate.late) == ((), 1, 1, False)


def test_a_mutant_that_raises_is_killed(bench: MutantWorkbench) -> None:
    before = reference.norm.rms_norm
    fate = put(few(bench, *NORM), mutant_of("norm", "statement deleted", "normed ="), 5)
    assert (fate.by, fate.late) == (NORM[0], False)
    assert reference.norm.rms_norm is before


def test_a_mutant_that_does_not_end_is_killed_by_time(bench: MutantWorkbench) -> None:
    endless = mutant_of("sampling", "> becomes >=", "while count > 0")
    fate = put(few(bench, "sampling/distribution/own-draws"), endless, 0.1)
    assert (fate.by, fate.late) == ("sampling/distribution/own-draws", True)


def test_a_mutant_that_means_the_same_survives_unchanged(bench: MutantWorkbench) -> None:
    # `max(1, n)` of an n that is 1 or more.
    fate = put(few(bench, "sampling/distribution/own-draws"), mutant_of("sampling", "1 becomes 0", "max(1,"), 5)
    assert (fate.by, fate.changed, fate.tried, fate.left) == ("", (), 1, 0)
    assert (accepted([fate]), unchanged([fate])) == ([], [fate])


def test_a_mutant_whose_other_results_are_accepted(bench: MutantWorkbench) -> None:
    fate = put(few(bench, *NORM), RIGHT_BUT_DIFFERENT, 5)
    assert fate.by == ""
    assert fate.changed == NORM[:1]
    assert (accepted([fate]), unchanged([fate])) == ([fate], [])


def test_the_limit_ends_the_search(bench: MutantWorkbench) -> None:
    fate = put(few(bench, *NORM), RIGHT_BUT_DIFFERENT, 1e-9)
    assert (fate.by, fate.tried, fate.left) == ("", 1, 1)


def test_cases_that_do_not_call_the_function_are_passed_over(bench: MutantWorkbench) -> None:
    both = few(bench, *NORM, "sampling/distribution/own-draws")
    fate = put(both, mutant_of("sampling", "1 becomes 0", "max(1,"), 5)
    assert (fate.by, fate.tried, fate.left) == ("", 1, 0)
    fate = put(few(bench, "sampling/distribution/own-draws"), RIGHT_BUT_DIFFERENT, 5)
    assert (fate.by, fate.tried, fate.left) == ("", 0, 0)


def test_the_functions_that_a_case_calls(bench: MutantWorkbench) -> None:
    assert bench.called(NORM[0]) == {"norm.rms_norm", "precision.to_bf16", "precision.round_to"}
    # Of two cases: neither tables nor configurations that an earlier case made hide what makes them.
    for case_id in ("rotary/pairs-adjacent-forward/compressed", "rotary/pairs-adjacent-inverse/compressed"):
        called = bench.called(case_id)
        assert {"rotary._frequencies", "rotary.base_frequencies", "config.Config.from_mapping"} <= called


def test_a_suite_that_raises_is_no_survivor(bench: MutantWorkbench, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = PreparedCase.judge
    monkeypatch.setattr(PreparedCase, "judge", lambda *a, **k: replace(judge(*a, **k), status="BROKEN", message="oh"))
    fate = put(few(bench, *NORM), RIGHT_BUT_DIFFERENT, 5)
    assert (fate.by, fate.problem) == ("", f"{NORM[0]}: oh")
    assert accepted([fate]) == unchanged([fate]) == []


def test_own_cases_come_first_and_then_those_that_may_notice(bench: MutantWorkbench) -> None:
    cases = order(bench, written("gate.gate", ""))
    components = list(dict.fromkeys(case.component for case in cases))
    assert components == [name for name in COMPONENTS[COMPONENTS.index("gate") :] if name in components]
    assert {"gate", "moe", "block"} <= set(components)
    assert all(case.mode != "propagated" and case.level != "full" for case in cases)
    assert any(case.mode == "propagated" for case in order(bench, written("block.Block.step", "")))
    norm = [case.id for case in order(few(bench, *reversed(NORM)), RIGHT_BUT_DIFFERENT)]
    assert norm == list(NORM)
    helped = [case.component for case in order(bench, written("precision.to_bf16", ""))]
    assert (helped[0], helped[-1]) == ("linear", "quantize")


def test_an_alarm_gives_back_the_one_before() -> None:
    def forever() -> None:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            pass

    def outer() -> None:
        with pytest.raises(OutOfTime):
            within(0.05, forever)
        assert within(5, lambda: "inner") == "inner"
        forever()

    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    start = time.monotonic()
    with pytest.raises(OutOfTime):
        within(0.2, outer)
    assert time.monotonic() - start < 5
    assert signal.getsignal(signal.SIGALRM) is handler
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) is (timer[0] > 0)


def test_a_sample_can_be_drawn_again() -> None:
    every = mutants("made", MODULE)
    drawn = sample(every, 0.3, 7)
    assert len(drawn) == 10
    assert drawn == [mutant for mutant in every if mutant in drawn]
    assert drawn == sample(every, 0.3, 7) != sample(every, 0.3, 8)
    assert len(sample(every, 1e-6, 7)) == 1
    assert sample(every, 1, 7) == every


def test_what_is_chosen() -> None:
    assert {m.target for m in chosen_mutants(MutantOptions(("gate", "norm")))} == {"gate.gate", "norm.rms_norm"}
    one = mutants("norm", (ROOT / "reference" / "norm.py").read_text())[0].id
    assert [m.id for m in chosen_mutants(MutantOptions(("linear", "norm"), one))] == [one]


def test_what_is_printed(
    bench: MutantWorkbench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    killed = mutant_of("norm", "mean becomes sum", "rsqrt")
    same = replace(RIGHT_BUT_DIFFERENT, number=2, source=inspect.getsource(reference.norm.rms_norm))
    chosen = [killed, RIGHT_BUT_DIFFERENT, same]

    def run(given: Sequence[Mutant], fixtures: Path | None, jobs: int, limit: float) -> Iterator[list[Fate]]:
        assert (fixtures, jobs, limit) == (None, 1, 3)
        yield from ([put(few(bench, *NORM), mutant, limit)] for mutant in reversed(given))

    monkeypatch.setattr(mutants_command, "run", run)
    monkeypatch.setattr(mutants_command, "all_mutants", lambda component: chosen if component == "norm" else [])
    monkeypatch.setattr(Fixtures, "open", lambda where: None)
    monkeypatch.setenv("COLUMNS", "80")
    report = tmp_path / "mutants.json"
    options = ["--component", "norm", "--share", "1", "--limit", "3", "--jobs", "1", "--json"]
    outcome = outcome_of(("faults", "--mutants", *options, str(report)), monkeypatch, capsys)
    assert outcome.code == 0
    groups = outcome.out.split("\n\n")
    assert [group.split(":")[0].strip() for group in groups[:2]] == [
        "accepted, though results differ from the reference's",
        "no result differs",
    ]
    assert f"first {NORM[0]}; 1 of 2 cases that call it" in groups[0]
    assert groups[1].endswith("\n      2 cases that call it")
    assert re.search(r"^norm +3 +1 +0 +1 +1$", groups[2], re.MULTILINE)
    again = re.search(r"\(--share 1 --seed (\d+)\)", outcome.err)
    assert again is not None
    totals = "1 killed, 1 accepted with other results, 1 without"
    assert groups[3].startswith(f"3 of 3 mutants {again[0]}: {totals}; ")
    written_down = json.loads(report.read_text())
    assert [(m["id"], m["by"], m["changed"]) for m in written_down] == [
        (killed.id, NORM[0], []),
        (RIGHT_BUT_DIFFERENT.id, "", [NORM[0]]),
        (same.id, "", []),
    ]


def test_an_interrupted_run_prints_what_it_has(
    bench: MutantWorkbench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> Iterator[list[Fate]]:
        yield [put(few(bench, *NORM), RIGHT_BUT_DIFFERENT, 5)]
        raise KeyboardInterrupt

    monkeypatch.setattr(mutants_command, "run", run)
    monkeypatch.setattr(
        mutants_command, "all_mutants", lambda component: [RIGHT_BUT_DIFFERENT, replace(RIGHT_BUT_DIFFERENT, number=2)]
    )
    monkeypatch.setattr(Fixtures, "open", lambda where: None)
    outcome = outcome_of(("faults", "--mutants", "--component", "norm"), monkeypatch, capsys)
    assert outcome.code == 130
    assert "2 of 2 mutants: 0 killed, 1 accepted with other results, 0 without, 1 not run; " in outcome.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--mutants --honest", "--honest does not go with --mutants"),
        ("--mutants --headroom", "--headroom does not go with --mutants"),
        ("--mutants --seeds 2", "--seeds does not go with --mutants"),
        ("--mutants --quick", "--quick does not go with --mutants"),
        ("--mutants --fault eps-of-vision", "--fault does not go with --mutants"),
        ("--share 0.1", "--share goes with --mutants"),
        ("--seed 1", "--seed goes with --mutants"),
        ("--honest --limit 2", "--limit does not go with --honest"),
        ("--headroom --quick", "--quick does not go with --honest"),
        ("--seeds 2", "--seeds goes with --honest"),
        ("--mutants --seed 1", "--seed goes with --share"),
        ("--mutants --share 0", "--share 0: expected more than 0 and at most 1"),
        ("--mutants --share 1.5", "--share 1.5: expected more than 0 and at most 1"),
        ("--mutants --share nan", "--share nan: expected"),
        ("--mutants --limit 0", "--limit 0: expected seconds, more than 0"),
        ("--mutants --limit inf", "--limit inf: expected seconds"),
        ("--mutants --component config", "--component config: no such component"),
        ("--mutants --component norm -k no-such-mutant", "no mutant is selected"),
        ("--mutants --component norm -k (", "-k '(': expected"),
        ("--mutants --component norm --fixtures nowhere", "nowhere"),
    ],
)
def test_what_is_refused(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in outcome_of(("faults", *arguments.split()), monkeypatch, capsys).error
