"""`conformance bench suite`: what is measured and how it is shown; never how long it took."""

import json
import signal
import subprocess

import pytest
from rich.console import Console

from conformance.bench import suite, suite_probe
from conformance.commands.bench import bench
from conformance.errors import ConformanceError


def measured(*parts: str, **options) -> list[suite.Measurement]:
    chosen = suite.SuiteOptions(parts, **options)
    return [one for part in parts for one in suite.PARTS[part](chosen)]


def test_start_up_runs_every_command_that_should_answer_at_once():
    found = measured("start")
    assert [one.what for one in found] == [" ".join(words) for words, _ in suite.STARTS]
    assert all(one.seconds > 0 and one.processor > 0 and one.peak_bytes > 1 << 20 for one in found)


def test_fixtures_are_opened_with_and_without_hashes():
    assert [one.what for one in measured("fixtures")] == ["open, headers only", "open and verify", "make the catalogue"]


def test_a_prefill_and_a_step_are_measured_at_every_length_for_every_unit(monkeypatch):
    monkeypatch.setattr(suite, "UNITS", {"model": "the tiny model"})
    found = [(one.what.partition(" ")[0], one.size) for one in measured("length", lengths=(3, 5))]
    assert found == [("prefill", 3), ("one", 3), ("prefill", 5), ("one", 5)]


def test_the_smoke_level_is_split_into_its_components(monkeypatch):
    monkeypatch.setattr(suite, "LEVELS", ("smoke",))
    whole, *parts = measured("check")
    assert whole.size == sum(part.size for part in parts)
    assert {part.what for part in parts} >= {"smoke, quantize", "smoke, model"}
    # A sum of times inside one process has no memory of its own.
    assert whole.peak_bytes
    assert not any(part.peak_bytes for part in parts)


def test_json_holds_every_measurement_and_the_machine(tmp_path):
    path = tmp_path / "suite.json"
    assert suite.bench(suite.SuiteOptions(("fixtures",), json=path), Console(quiet=True)) == 0
    stored = json.loads(path.read_text())
    assert stored["format"] == suite.FORMAT
    assert stored["environment"]["python"]
    assert {one["part"] for one in stored["measurements"]} == {"fixtures"}
    assert not list(tmp_path.glob("*.partial"))


def test_an_unknown_part_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr(suite, "_run", lambda *arguments: pytest.fail("something was run"))
    with pytest.raises(ConformanceError, match="no such part; there are start, fixtures"):
        suite.bench(suite.SuiteOptions(("start", "sped")), Console(quiet=True))


@pytest.mark.parametrize("text", ["", "0", "-1", "64,", "64;128", "1e3", "99999999999999999999", str(1 << 18)])
def test_lengths_that_are_none_are_refused(text):
    with pytest.raises(ConformanceError, match="--lengths"):
        suite.parse_lengths(text)


def test_lengths_are_read():
    assert suite.parse_lengths("64, 1024") == (64, 1024)


def test_a_run_that_fails_is_an_error_and_no_time(monkeypatch):
    monkeypatch.setattr(suite, "STARTS", ((("check", "no-such-target"), 0),))
    with pytest.raises(ConformanceError, match=r"exit code 2, expected 0: .*unknown target"):
        measured("start")


def test_an_interrupted_run_leaves_no_process(monkeypatch, capsys):
    started = []

    class Noting(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(suite.subprocess, "Popen", Noting)
    monkeypatch.setattr(suite.os, "wait4", interrupted)
    monkeypatch.setattr(suite, "STARTS", ((("check", "reference", "--level", "full"), 0),))
    assert bench(["suite", "start"]) == 130
    assert "conformance: interrupted" in capsys.readouterr().err
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_every_unit_can_be_probed():
    assert set(suite.UNITS) == set(suite_probe.UNITS)


def test_the_command_hands_parts_and_lengths_on():
    with pytest.raises(ConformanceError, match="no such part"):
        bench(["suite", "sped"])
    with pytest.raises(ConformanceError, match="--lengths x: expected"):
        bench(["suite", "length"], lengths="x")
    with pytest.raises(ConformanceError, match="--lengths is for"):
        bench(["rms_norm"], lengths="64")
