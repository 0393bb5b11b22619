"""`pytest --conformance`: one item a case, and everything of pytest's that people expect of items."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import cli_ports
import pytest
from cli_runs import Run
from test_cli_report import VALIDATOR, read

# pytester forgets every module that a run imports, so that what is not imported before would exist twice.
from conformance.adapters import in_process
from conformance.cases import catalogue
from conformance.cases.vectors import hyper_connections
from conformance.fixtures import Fixtures
from conformance.pytest_plugin import (
    cases as plugin_cases,
    explanations as plugin_explanations,
    report as plugin_report,
)
from conformance.pytest_plugin.gpu import give_worker_its_gpu

pytest_plugins = ("pytester",)
KEPT = (in_process, plugin_cases, plugin_report)

EXAMPLE = Path(__file__).parents[2] / "ci" / "examples" / "two_components.py"
ROWS_1, ROWS_10, ONES, EMBED = (
    f"conformance::{case_id}"
    for case_id in ("quantize/identity/rows-1", "quantize/identity/rows-10", "norm/identity/ones", "model/embed/row")
)
Pytest = Callable[..., pytest.RunResult]


@pytest.fixture
def run_pytest(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, shipped: Fixtures) -> Pytest:
    """pytest in this process, put to the hand-made catalogue; without a target, in whose stead stands a test file."""
    really_open = Fixtures.open
    monkeypatch.setattr(
        Fixtures, "open", lambda where=None, **options: shipped if where is None else really_open(where, **options)
    )
    monkeypatch.setattr(catalogue, "catalogue", lambda fixtures: cli_ports.CASES)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    pytester.makepyfile(test_own="def test_own(): pass")

    def call(port: str, *arguments: str) -> pytest.RunResult:
        # Naming the mistake behind each failure takes seconds, and has tests of its own.
        target = ["--conformance", f"cli_ports:{port}", "--conformance-explain", "0"] if port else []
        options = ("-p", "no:cacheprovider", *target)
        return pytester.runpytest_inprocess(*options, *arguments, no_reraise_ctrlc=True)

    return call


def ran(result: pytest.RunResult) -> list[str]:
    """The ids of items, from a run with -v or --collect-only -q."""
    words = [line.split()[0] for line in result.outlines if "::" in line]
    return list(dict.fromkeys(word for word in words if word.startswith(("conformance::", "test_own"))))


def test_one_item_a_case_beside_the_repositorys_own_tests(run_pytest: Pytest) -> None:
    result = run_pytest("Good", "--collect-only", "-q")
    assert ran(result) == ["test_own.py::test_own", ROWS_1, ROWS_10, ONES, EMBED]
    result.stdout.fnmatch_lines(["5 tests collected in *"])


def test_outcomes(run_pytest: Pytest) -> None:
    result = run_pytest("Wrong", "-rs")
    result.assert_outcomes(passed=2, failed=2, skipped=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*UNSUPPORTED: embed needs a vocabulary of ?64?"])
    result.stdout.fnmatch_lines(["does not conform: 2 of 3 supported cases failed; 1 unsupported"])


def test_a_failure_shows_the_suites_explanation_and_no_trace(run_pytest: Pytest) -> None:
    out = run_pytest("Wrong").stdout.str()
    for text in (
        "tap       values (exact): 1 of 8 elements differ",
        "actual    14.0                     0x4160",
        "why       A group is scaled by its neighbour's scale.",
        "re-run    conformance check cli_ports:Wrong -k quantize/identity/rows-1\n",
    ):
        assert text in out
    assert "runtest" not in out
    assert "Traceback" not in out


TRANSPOSED = """
from conformance.adapters.reference import Reference


class CombTransposed(Reference):
    def hyper_connection_write(self, y, h, post, comb):
        return super().hyper_connection_write(y, h, post, comb.transpose(-1, -2))
"""
PLENTY = 600.0
"""Seconds: no test may depend on how much can be tried in a time."""


@pytest.fixture(autouse=True)
def outside_of_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of these set, pytest repeats whole failures in its summary."""
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)


NAMED = "your values equal ours with: The write sums over the second index of the mixing matrix"


def test_a_failure_names_the_known_mistake_whose_values_came_back(
    pytester: pytest.Pytester, run_pytest: Pytest, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = [case for case in hyper_connections.cases() if case.id.startswith("hyper_connections/lattice-write/")]
    assert len(written) > 1
    monkeypatch.setattr(catalogue, "catalogue", lambda fixtures: written)
    monkeypatch.setattr(plugin_explanations, "MOST_FOR_ONE", PLENTY)
    pytester.makepyfile(transposed=TRANSPOSED)
    report = pytester.path / "report.jsonl"
    arguments = ("--conformance", "transposed:CombTransposed", "conformance::", "--conformance-report", str(report))
    with_time = (*arguments, "--conformance-explain", str(PLENTY), "--junitxml", "junit.xml")
    said = " ".join(pytester.runpytest_inprocess(*with_time).stdout.str().split())
    assert said.count(NAMED) == len(written)
    bodies = [failure.text or "" for failure in ElementTree.parse(pytester.path / "junit.xml").iter("failure")]
    assert [NAMED in " ".join(body.split()) for body in bodies] == [True] * len(written)
    matched = [record["matched"][0]["flag"] for record in read(report) if record["type"] == "case"]
    assert matched == ["comb-transposed"] * len(written)
    without = pytester.runpytest_inprocess(*arguments, "--conformance-explain", "0")
    without.assert_outcomes(failed=len(written))
    assert "your values" not in without.stdout.str()


def test_an_explanation_that_cannot_be_had_costs_nothing_of_the_failure(
    run_pytest: Pytest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(plugin_explanations.Matcher, "look", broken)
    result = run_pytest("Wrong", "--conformance-explain", "9")
    result.assert_outcomes(passed=2, failed=2, skipped=1)
    result.stdout.fnmatch_lines(["*values (exact): 1 of 8 elements differ*", "*known mistakes: MemoryError: no room"])


@pytest.mark.parametrize("seconds", ["-1", "nan", "soon"])
def test_seconds_that_are_none_are_refused(run_pytest: Pytest, seconds: str) -> None:
    result = run_pytest("Good", f"--conformance-explain={seconds}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--conformance-explain*expected seconds*"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-k", "norm"], [ONES]),
        (["-k", "quantize and not rows-10"], [ROWS_1]),
        (["-k", "quantize/identity/rows-10"], [ROWS_10]),
        (["-m", "conformance"], [ROWS_1, ROWS_10, ONES, EMBED]),
        (["-m", "not conformance"], ["test_own.py::test_own"]),
        (["-m", "conformance(component='norm')"], [ONES]),
        (["-m", "conformance(level='smoke')"], [ROWS_1]),
        (["-m", "conformance(device='cuda')"], []),
        (["-m", "conformance", "--deselect", "conformance::quantize"], [ONES, EMBED]),
        (["-m", "conformance", "--conformance-component", "norm"], [ONES]),
        (["-m", "conformance", "--conformance-level", "smoke"], [ROWS_1]),
        (["-m", "conformance", "--conformance-set", "tiny"], [ROWS_1]),
        (
            ["-m", "conformance", "--conformance-reading", "literal", "-k", "slot"],
            ["conformance::indexer/slot/literal"],
        ),
        (["conformance::norm"], [ONES]),
        (["conformance::norm/identity", ROWS_1], [ROWS_1, ONES]),
        (["conformance::quantize/identity/rows-1"], [ROWS_1]),
        (["conformance::"], [ROWS_1, ROWS_10, ONES, EMBED]),
        (["test_own.py", "conformance::norm"], ["test_own.py::test_own", ONES]),
        (["test_own.py", "-k", "own or norm"], ["test_own.py::test_own", ONES]),
    ],
)
def test_selection(run_pytest: Pytest, arguments: list[str], expected: list[str]) -> None:
    assert ran(run_pytest("Good", "--collect-only", "-q", *arguments)) == expected


def test_shards_cover_everything_once(run_pytest: Pytest) -> None:
    parts = [ran(run_pytest("Good", "--co", "-q", "conformance::", "--conformance-shard", f"{n}/2")) for n in (1, 2)]
    assert sorted(itertools.chain(*parts)) == sorted([ROWS_1, ROWS_10, ONES, EMBED])


@pytest.mark.parametrize(
    ("arguments", "cases"),
    [([], 4), (["."], 4), (["test_own.py"], 0), (["sub"], 0), (["test_own.py", "conformance::norm"], 1)],
)
def test_one_line_of_configuration(
    pytester: pytest.Pytester, run_pytest: Pytest, arguments: list[str], cases: int
) -> None:
    """A target in the configuration belongs to runs of the whole repository, not to `pytest tests/test_one.py`."""
    pytester.makeini("[pytest]\naddopts = --conformance cli_ports:Good\n")
    pytester.mkdir("sub")
    found = ran(run_pytest("", "--collect-only", "-q", *arguments))
    assert sum(name.startswith("conformance::") for name in found) == cases


def test_last_failed_and_first_failure(pytester: pytest.Pytester, run_pytest: Pytest) -> None:
    arguments = ("--conformance", "cli_ports:Wrong", "conformance::", "-v")
    assert ran(pytester.runpytest_inprocess(*arguments)) == [ROWS_1, ROWS_10, ONES, EMBED]
    assert ran(pytester.runpytest_inprocess(*arguments, "--lf")) == [ROWS_1, ROWS_10]
    assert ran(pytester.runpytest_inprocess(*arguments, "--ff"))[:2] == [ROWS_1, ROWS_10]
    assert ran(pytester.runpytest_inprocess(*arguments, "-x")) == [ROWS_1]


def test_report_is_that_of_check(run_pytest: Pytest, run: Run, tmp_path: Path) -> None:
    run_pytest("Wrong", "--conformance-report", str(tmp_path / "report.jsonl"))
    run("check", "cli_ports:Wrong", "--json", str(tmp_path / "check.jsonl"))
    ours, theirs = read(tmp_path / "report.jsonl"), read(tmp_path / "check.jsonl")
    for line in ours:
        VALIDATOR.validate(line)
    for record in (*ours, *theirs):
        for name in ("seconds", "started", "peak_memory_bytes", "environment"):
            record.pop(name, None)
    assert ours == theirs


def test_the_report_of_a_run_that_stopped_says_so(run_pytest: Pytest, pytester: pytest.Pytester) -> None:
    run_pytest("Wrong", "--conformance-report", "report.jsonl", "-x", "conformance::")
    assert read(pytester.path / "report.jsonl")[-1]["stopped"] == "fail-fast"
    run_pytest("Interrupted", "--conformance-report", "report.jsonl", "conformance::")
    footer = read(pytester.path / "report.jsonl")[-1]
    assert (footer["stopped"], footer["exit_code"]) == ("interrupted", 130)


def test_everything_unsupported_is_no_pass(run_pytest: Pytest) -> None:
    result = run_pytest("Nothing", "conformance::")
    result.assert_outcomes(skipped=4)
    assert result.ret == 1


def test_expectations(run_pytest: Pytest, pytester: pytest.Pytester) -> None:
    url = "https://example.org/issues/1"
    entry = '[[expect]]\npattern = "{}"\nstatus = "{}"\nreason = "known"\nurl = "' + url + '"\n'
    pytester.path.joinpath("known.toml").write_text(
        entry.format("quantize/*", "xfail") + entry.format("norm/*", "quarantine")
    )
    result = run_pytest("Wrong", "--conformance-expect", "known.toml", "-rsx", "conformance::")
    result.assert_outcomes(xfailed=2, skipped=2)
    result.stdout.fnmatch_lines([f"*quarantine: known ({url})", f"XFAIL {ROWS_1} - known ({url})"])
    assert result.ret == 0
    result = run_pytest("Good", "--conformance-expect", "known.toml", "conformance::")
    result.assert_outcomes(failed=2, skipped=2)
    result.stdout.fnmatch_lines(["XPASS  quantize/identity/rows-1"])


def test_properties_in_junit(run_pytest: Pytest, pytester: pytest.Pytester) -> None:
    run_pytest("Wrong", "--junitxml", "junit.xml")
    root = ElementTree.fromstring((pytester.path / "junit.xml").read_text())
    case = next(case for case in root.iter("testcase") if case.get("name") == "quantize/identity/rows-1")
    assert case.get("classname") == "conformance"
    properties = {entry.get("name"): entry.get("value") for entry in case.iter("property")}
    assert properties == {
        "status": "FAIL",
        "error_over_bound": "inf",
        "judged": "8",
        "flags": "scale-of-neighbour",
        "spec": "numerics.md 2",
        "rerun": "conformance check cli_ports:Wrong -k quantize/identity/rows-1",
        "where": "values: layer 3, call 1, position 8, feature 2",
    }


def test_annotations_only_in_actions(run_pytest: Pytest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "::error" not in run_pytest("Wrong").stdout.str()
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    run_pytest("Wrong").stdout.fnmatch_lines(["::error title=FAIL quantize/identity/rows-1::FAIL: values: 1 of 8*"])


@pytest.mark.parametrize(
    ("port", "arguments", "text"),
    [
        ("Missing", [], "ERROR: conformance: target 'cli_ports:Missing': module cli_ports has no Missing"),
        ("Good", ["conformance::gate"], "ERROR: conformance: conformance::gate: selects no case"),
        ("Good", ["--conformance-component", "kitchen"], "ERROR: conformance: --component kitchen: no such component"),
        ("Good", ["--conformance-expect", "none.toml"], "ERROR: conformance: --expect none.toml: No such file"),
        ("Good", ["--conformance-report", "."], "ERROR: --conformance-report .: is a directory"),
        ("Good", ["--conformance-shard", "3/2"], "ERROR: conformance: --shard 3/2: expected i/n"),
        ("", ["--conformance-level", "core"], "ERROR: --conformance-level needs --conformance TARGET"),
    ],
)
def test_bad_arguments_are_one_line(run_pytest: Pytest, port: str, arguments: list[str], text: str) -> None:
    result = run_pytest(port, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert sum(line.startswith(text) for line in result.outlines + result.errlines) == 1
    assert "Traceback" not in result.stdout.str() + result.stderr.str()


# In processes of their own, with the shipped cases -------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Somebody's repository: a port, and one line of configuration."""
    (tmp_path / "two_components.py").write_text(EXAMPLE.read_text())
    (tmp_path / "wrong.py").write_text(
        textwrap.dedent(
            """
            import os
            from two_components import Port as Right

            class Port(Right):
                def rms_norm(self, x, weight, eps):
                    return super().rms_norm(x, weight, 1e-3)

            class Dies(Right):
                def quantize_fp8(self, x):
                    os._exit(3)
            """
        )
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --conformance two_components:Port\n")
    return tmp_path


def start(repository: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "GITHUB"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=repository,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_in_a_repository_of_its_own(repository: Path) -> None:
    done = start(repository, "-m", "conformance(component='norm')")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^conforms: ([0-9]+) of \1 supported cases passed$", done.stdout, re.MULTILINE)


def test_workers_share_the_cases_and_the_controller_writes_the_report(repository: Path) -> None:
    arguments = ("--conformance", "wrong:Port", "conformance::norm", "-n", "2", "--conformance-report", "report.jsonl")
    done = start(repository, *arguments)
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("FAIL  norm/rms/block-inputs\n  tap") == 1
    records = read(repository / "report.jsonl")
    for record in records:
        VALIDATOR.validate(record)
    assert records[0]["cases"] == len({record["id"] for record in records[1:-1]}) == len(records) - 2
    counts = records[-1]["counts"]
    assert f"{counts['FAIL']} failed, {counts['PASS']} passed" in done.stdout
    assert counts["FAIL"] > 5
    assert records[-1]["exit_code"] == 1


def test_a_worker_that_dies_fails_its_case_and_no_other(repository: Path) -> None:
    arguments = ("--conformance", "wrong:Dies", "-n", "1", "--conformance-report", "report.jsonl")
    done = start(repository, *arguments, "conformance::norm", "conformance::quantize/fp8-floor/zeros")
    assert done.returncode == 1, done.stdout
    assert "crashed while running 'conformance::quantize/fp8-floor/zeros'" in done.stdout
    records = read(repository / "report.jsonl")
    assert records[-1]["counts"]["PASS"] == records[0]["cases"] - 1 > 5
    assert records[-1]["stopped"] == "no record of quantize/fp8-floor/zeros"
    assert records[-1]["exit_code"] == 1


def test_a_bad_target_is_one_line_with_workers_too(repository: Path) -> None:
    done = start(repository, "--conformance", "nowhere:Port", "-n", "1")
    assert done.returncode not in (0, 5)
    assert "target 'nowhere:Port': cannot import nowhere" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_runs_that_do_not_ask_for_it_import_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        "import sys\n\n"
        "def test_own():\n"
        "    assert 'conformance.pytest_plugin' in sys.modules\n"
        "    assert not {'torch', 'numpy', 'rich', 'typer', 'jsonschema', 'conformance.cases'} & set(sys.modules)\n"
    )
    # Other plugins of this environment may import anything.
    done = start(tmp_path, "-p", "conformance.pytest_plugin", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("visible", "worker", "given"),
    [
        ("0,1", "gw0", "0"),
        ("0,1", "gw1", "1"),
        ("3, 5", "gw3", "5"),
        ("GPU-a,GPU-b,GPU-c", "gw5", "GPU-c"),
        ("2", "gw1", "2"),
        ("", "gw1", ""),
    ],
)
def test_one_gpu_a_worker(monkeypatch: pytest.MonkeyPatch, visible: str, worker: str, given: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    give_worker_its_gpu(worker)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == given


def test_all_gpus_are_shared_out_when_none_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    give_worker_its_gpu("gw6")
    assert os.environ.pop("CUDA_VISIBLE_DEVICES") == "2"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    give_worker_its_gpu("gw6")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
