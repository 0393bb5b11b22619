"""`conformance check`: exit codes, what is printed, and that no port can break it."""

from __future__ import annotations

import cli_ports
import pytest
from cli_runs import Run

from conformance.fixtures import Fixtures


def test_conforming_port(run: Run) -> None:
    outcome = run("check", "cli_ports:Good")
    assert outcome.code == 0
    assert outcome.err == ""
    assert "conforms in what it supports: 3 of 3 supported cases passed; 1 unsupported" in outcome.out
    assert "embed needs a vocabulary of [64] (1 case of model)" in outcome.out
    assert "allowance measured, not derived: test (1 case)" in outcome.out
    assert "[bold]fp32[/bold]" in outcome.out


def test_header_names_what_was_run(run: Run, shipped: Fixtures) -> None:
    out = run("check", "cli_ports:Good").out
    assert "cli_ports:Good: good 1 (Python, cpu)" in out
    assert f"lock {shipped.lock_hash[:12]}: " in out
    assert "4 at level core; 1 of the other reading left out" in out


def test_failure_shows_all_that_is_needed(run: Run) -> None:
    outcome = run("check", "cli_ports:Wrong", "--set", "tiny")
    assert outcome.code == 1
    for text in (
        "FAIL  quantize/identity/rows-1\n",
        "values (exact): 1 of 8 elements differ",
        "quantize, layer 3, call 1, position 8, feature 2",
        "14.0                     0x4160",
        "7.0                      0x40e0",
        "7 (none is allowed)",
        "A group is scaled by its neighbour's scale.",
        "scale-of-neighbour",
        "tiny/prefill-17",
        "conformance check cli_ports:Wrong --set tiny -k quantize/identity/rows-1\n",
        "does not conform: 1 of 1 supported cases failed\n",
    ):
        assert text in outcome.out


def test_output_fits_80_columns_except_commands(run: Run) -> None:
    lines = run("check", "cli_ports:Wrong", "--verbose").out.splitlines()
    assert [line for line in lines if len(line) > 80 and "re-run" not in line] == []
    assert not any(line != line.rstrip() and "modes" not in line for line in lines if "exact" not in line)


@pytest.mark.parametrize(
    ("port", "status", "text"),
    [
        ("Raises", "CRASH", "raised RuntimeError: device [0] is on fire"),
        ("WrongShape", "FAIL", "wrong shape [1, 4], expected [2, 4]"),
        ("WrongDtype", "FAIL", "wrong dtype I32, expected BF16"),
        ("ReturnsNan", "FAIL", "8 of 8 elements differ"),
        ("TooManyResults", "FAIL", "expected 1 results (values), got 2"),
        ("ReturnsText", "FAIL", "a str is neither torch, numpy nor DLPack"),
        ("ModifiesInput", "FAIL", "modified its input x"),
    ],
)
def test_faulty_port(run: Run, port: str, status: str, text: str) -> None:
    outcome = run("check", f"cli_ports:{port}", "-k", "quantize/identity/rows-1")
    assert outcome.code == 1
    assert f"{status}  quantize/identity/rows-1\n" in outcome.out
    assert text in " ".join(outcome.out.split())
    assert f"conformance check cli_ports:{port} -k quantize/identity/rows-1\n" in outcome.out


def test_everything_unsupported_is_no_pass(run: Run) -> None:
    outcome = run("check", "cli_ports:Nothing")
    assert outcome.code == 1
    assert "no verdict: no case is supported; 4 unsupported" in outcome.out
    assert "not implemented: fake_quantize_fp8" in outcome.out


def test_broken_case_is_the_suites_fault(run: Run) -> None:
    outcome = run("check", "cli_ports:Good", cases=[*cli_ports.GOOD_CASES, cli_ports.BROKEN_CASE])
    assert outcome.code == 1
    assert "Faults of the suite itself" in outcome.out
    assert "no verdict: 3 of 3 supported cases passed; 1 broken in the suite itself" in outcome.out


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("nowhere", "unknown target 'nowhere'"),
        ("no_such_module:Port", "cannot import no_such_module"),
        ("cli_ports:Missing", "module cli_ports has no Missing"),
        ("cli_ports:NotAPort", "NotAPort is not a subclass of conformance.Implementation"),
        ("cli_ports:CannotBeMade", "CannotBeMade() raised OSError: no such device"),
        ("cli_ports:BadReading", "declares reading 'sideways', not intended or literal"),
    ],
)
def test_bad_target(run: Run, target: str, text: str) -> None:
    assert text in run("check", target).error


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "Missing argument 'TARGET'"),
        (("cli_ports:Good", "--level", "huge"), "--level"),
        (("cli_ports:Good", "--frobnicate"), "--frobnicate"),
        (
            ("cli_ports:Good", "--component", "kitchen"),
            "--component kitchen: no such component; there are quantize, norm",
        ),
        (("cli_ports:Good", "--set", "large"), "--set large: selects no case"),
        (("cli_ports:Good", "-k", "nothing"), "-k 'nothing': selects no case"),
        (("cli_ports:Good", "-k", "norm and"), "-k 'norm and': expected a word, found the end"),
        (("cli_ports:Good", "-k", "norm/identity/full"), "--level core: selects no case; use --level full for the 1"),
        (("cli_ports:Good", "--reading", "intended", "-k", "literal"), "--reading intended: all 1 selected cases"),
        (("cli_ports:Good", "--shard", "0/3"), "--shard 0/3: expected i/n"),
        (("cli_ports:Good", "--shard", "9/9"), "--shard 9/9: empty, only 4 cases are selected"),
        (("cli_ports:Good", "--fixtures", "no-such-folder"), "no-such-folder: not a directory"),
    ],
)
def test_bad_arguments(run: Run, arguments: tuple[str, ...], text: str) -> None:
    assert text in run("check", *arguments).error


def test_unknown_command(run: Run) -> None:
    assert "chekc" in run("chekc").error


def test_error_of_the_suite_is_no_verdict(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fixtures, "open", lambda directory, **options: 1 / 0)
    assert "internal error, please report: ZeroDivisionError: division by zero at test_cli_check.py:" in (
        run("check", "cli_ports:Good").error
    )


def test_port_that_ends_the_process_does_not_choose_the_exit_code(run: Run) -> None:
    outcome = run("check", "cli_ports:Quits")
    assert outcome.code in (1, 2)


def test_reading_is_the_ports_unless_given(run: Run) -> None:
    assert "literal" in run("check", "cli_ports:Literal", "-k", "indexer").out
    outcome = run("check", "cli_ports:Good", "--reading", "literal", "-k", "indexer/slot/literal", "--verbose")
    assert outcome.code == 0
    assert "PASS        indexer/slot/literal" in outcome.out


def test_rerun_command_keeps_level_and_reading(run: Run) -> None:
    out = run("check", "cli_ports:Wrong", "--reading", "literal", "-k", "indexer").out
    assert "conformance check cli_ports:Wrong --reading literal -k indexer/slot/literal\n" in out


def test_fail_fast(run: Run) -> None:
    outcome = run("check", "cli_ports:Wrong", "-x")
    assert outcome.code == 1
    assert "stopped after 1 of 4 cases: fail-fast" in outcome.out
    assert "does not conform: 1 of 1 supported cases failed; 3 not run" in outcome.out


def test_smoke_is_compact(run: Run) -> None:
    outcome = run("smoke", "cli_ports:Wrong")
    assert outcome.code == 1
    assert "values: 1 of 8 elements differ" in outcome.out
    assert len(outcome.out.splitlines()) <= 10
    assert run("smoke", "cli_ports:Good").code == 0


def test_interrupted_says_what_was_done(run: Run) -> None:
    outcome = run("check", "cli_ports:Interrupted")
    assert outcome.code == 130
    assert "stopped after 2 of 4 cases: interrupted" in outcome.out
    assert "no verdict: 2 of 2 supported cases passed so far; 2 not run" in outcome.out
