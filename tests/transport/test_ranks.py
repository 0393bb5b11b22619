"""`conformance check --world-size`: ranks as processes, all of them judged."""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from conformance.adapters.ranks import RanksSession
from conformance.cases.case import Case
from conformance.cases.catalogue import catalogue
from conformance.errors import TargetError
from conformance.fixtures import Fixtures
from conformance.runner import CaseResult, run_case

pytestmark = pytest.mark.timeout(300)
Run = Callable[[str, str], CaseResult]


@pytest.fixture(scope="module")
def all_cases() -> dict[str, Case]:
    return {case.id: case for case in catalogue(Fixtures.open(None))}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[RanksSession]:
    with closing(RanksSession("reference-parallel", request.param)) as session:
        yield session


@pytest.mark.parametrize(
    "case_id",
    [
        "linear/fp8-weight/one-token",
        "model/embed/trace",
        "model/head-reads-with-last-mix/trace",
        "attention/queries-rotated-by-layer-kind/trace",
        "attention/output-turned-back-and-grouped/trace",
        "attention/sources-and-reuse/prompt-and-steps",
        "experts/weighted-sum-and-clamps/trace",
        "engram/write/text",
        "block/engram-before-coefficients/steps",
        "model/free-running/prefill-2-tokens",
    ],
)
def test_ranks_give_what_one_rank_gives(ranks: RanksSession, all_cases: dict[str, Case], case_id: str) -> None:
    result = run_case(all_cases[case_id], ranks)
    assert result.status == "PASS", result.message or result.first_failure


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, all_cases: dict[str, Case]) -> Run:
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])

    def run_one(port: str, case_id: str) -> CaseResult:
        with closing(RanksSession(f"rank_ports:{port}", 2, timeout=60)) as session:
            return run_case(all_cases[case_id], session)

    return run_one


@pytest.mark.parametrize(
    ("port", "case_id"),
    [
        ("PartialSumsRounded", "linear/fp8-weight/many-tokens"),
        ("PartialSumsNotReduced", "linear/fp8-weight/one-token"),
        ("ReducedOnRankZeroOnly", "linear/fp8-weight/one-token"),
        ("VocabularyNotShifted", "model/embed/trace"),
        ("SharedExpertOnEveryRank", "experts/weighted-sum-and-clamps/trace"),
    ],
)
def test_a_mistake_of_ranks_is_rejected(run: Run, port: str, case_id: str) -> None:
    result = run(port, case_id)
    assert result.status == "FAIL"
    if port == "ReducedOnRankZeroOnly":
        assert result.first_failure is not None
        assert result.first_failure.where.startswith("rank 1, ")


def test_choices_must_be_equal_on_every_rank(run: Run) -> None:
    """Among equal logits any token is right, but not one on one rank and another on the next."""
    result = run("RanksDisagree", "sampling/greedy/equal-largest-logits")
    assert (result.status, result.message) == (
        "FAIL",
        "rank 1 has another output_ids than rank 0: choices must be equal on every rank",
    )


def test_a_rank_that_raises_is_named_and_the_next_case_begins_anew(all_cases: dict[str, Case], run: Run) -> None:
    with closing(RanksSession("rank_ports:RankDies", 2, timeout=60)) as session:
        result = run_case(all_cases["model/embed/trace"], session)
        assert result.status == "CRASH"
        assert "rank 1: embed raised RuntimeError: out of memory" in result.message
        assert run_case(all_cases["sampling/greedy/trace"], session).status == "PASS"


def test_ranks_that_refuse_together_go_on(run: Run) -> None:
    assert run("RefusesTogether", "model/embed/trace").status == "UNSUPPORTED"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("reference", "does not declare parallel = True"),
        ("nothing:Such", "cannot import nothing"),
        ("cmd:false", "cmd:false"),
    ],
)
def test_a_target_without_ranks_is_refused_in_one_line(target: str, message: str) -> None:
    with pytest.raises(TargetError) as refused:
        RanksSession(target, 2)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
