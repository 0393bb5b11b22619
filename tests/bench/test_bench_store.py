"""Stored numbers: read what was written, refuse what is damaged, never mix devices or declarations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_problems import SMALL
from bench_runs import DEVICE

from conformance.bench import charts, store
from conformance.bench.problem import Counts
from conformance.bench.results import Entry, Measured, Report, Times
from conformance.bench.roofs import Roofs
from conformance.bench.store import StoreError

SAMPLES = [2.0e-3, 1.0e-3, 3.0e-3, 1.5e-3, 2.5e-3]


def report(samples: list[float] = SAMPLES, started: str = "2030-01-01T00:00:00+00:00") -> Report:
    entries = [
        Entry(declared, "measured", counts=Counts(1e6, 1000), times=Times(samples), how="perf_counter", sets=2, calls=3)
        for declared in SMALL[:2]
    ]
    roofs = Roofs([1e9, 1e9], {"bf16": [1e12, 1e12]})
    return Report(Measured("port:Port", "port", "1"), DEVICE, roofs, entries, started, {"python": "3"})


def written(path: Path, **changes: Any) -> Path:
    """A stored file, its first entry changed: `device`, `stats`, ..."""
    content = json.loads(store.as_json(report()))
    first = content["benchmarks"][0]
    for name, value in changes.items():
        (first if name in first else first["extra_info"] if name in first["extra_info"] else content)[name] = value
    path.write_text(json.dumps(content))
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    first, second = store.read(written(tmp_path / "times.json"))
    assert (first.id, second.id) == (SMALL[0].id, SMALL[1].id)
    assert first.declaration == SMALL[0].hash
    assert first.device == DEVICE.name
    assert first.target == "port:Port"
    assert list(first.times.samples) == SAMPLES


def test_files_without_samples_give_their_quartiles(tmp_path: Path) -> None:
    """pytest-benchmark stores samples only where it is asked to."""
    stats = json.loads(store.as_json(report()))["benchmarks"][0]["stats"]
    del stats["data"]
    (first, _) = store.read(written(tmp_path / "times.json", stats=stats))
    whole = Times(SAMPLES)
    assert first.times.median == whole.median
    assert first.times.quartiles == whole.quartiles
    assert first.times.fastest == whole.fastest


def test_entries_of_others_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "times.json", extra_info={})
    assert [entry.id for entry in store.read(path)] == [SMALL[1].id]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"benchmarks": []}, "no benchmark of this suite in it"),
        ({"benchmarks": 3}, "no list of benchmarks in it"),
        ({"datetime": "yesterday"}, "datetime is missing, or no date"),
        ({"datetime": None}, "datetime is missing, or no date"),
        ({"device": 3}, "benchmark 0: extra_info lacks one of id, device, declaration, target"),
        ({"device": "a\nb"}, "benchmark 0: extra_info lacks one of"),
        ({"stats": None}, "benchmark 0: stats hold no times above 0"),
        ({"stats": {"data": [0.0]}}, "benchmark 0: stats hold no times above 0"),
        ({"stats": {"data": [float("nan")]}}, "benchmark 0: stats hold no times above 0"),
        ({"stats": {"data": [1e308]}}, "benchmark 0: stats hold no times above 0"),
        ({"stats": {"data": [10**400]}}, "benchmark 0: stats hold no times above 0"),
        ({"stats": {"data": [True]}}, "benchmark 0: stats hold no times above 0"),
        ({"stats": {"median": 1.0}}, "benchmark 0: stats hold no times above 0"),
    ],
)
def test_damaged_files(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    path = written(tmp_path / "times.json", **changes)
    with pytest.raises(StoreError) as refused:
        store.read(path)
    assert str(refused.value).startswith(str(path))
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_truncated_and_absent_files(tmp_path: Path) -> None:
    path = written(tmp_path / "times.json")
    path.write_text(path.read_text()[:-40])
    with pytest.raises(Exception, match="not valid JSON"):
        store.read(path)
    with pytest.raises(StoreError, match="No such file"):
        store.read(tmp_path / "none.json")


def test_only_the_same_device(tmp_path: Path) -> None:
    path = written(tmp_path / "times.json", device="another")
    stored = store.read(path)
    assert set(store.of_device(path, stored, DEVICE.name)) == {SMALL[1].hash}
    with pytest.raises(StoreError, match="measured on a device, another, this is a third"):
        store.of_device(path, stored, "a third")


def test_two_numbers_of_one_benchmark_are_none(tmp_path: Path) -> None:
    path = written(tmp_path / "times.json")
    stored = store.read(path)
    with pytest.raises(StoreError, match="which one to compare with"):
        store.of_device(path, [*stored, replace(stored[0])], DEVICE.name)


def test_names_differ_by_device_and_declaration() -> None:
    names = {
        store.name_of(declared, slug)
        for declared in (SMALL[0], replace(SMALL[0], sizes={**SMALL[0].sizes, "tokens": 9}))
        for slug in ("a", "b")
    }
    assert len(names) == 4


def test_history_is_of_this_device_and_oldest_first(tmp_path: Path) -> None:
    for name, when in (("b", "2030-03-01T00:00:00+00:00"), ("a", "2030-02-01T00:00:00+00:00")):
        (tmp_path / name).mkdir()
        content = store.as_json(report(started=when))
        (tmp_path / name / "times.json").write_text(content)
    written(tmp_path / "foreign.json", device="another")
    (tmp_path / "unrelated.json").write_text("[1, 2")
    found = store.history(tmp_path, DEVICE.name)
    assert [entry.when[:10] for entry in found[SMALL[0].hash]] == ["2030-02-01", "2030-03-01"]
    assert len(found[SMALL[1].hash]) == 3


def test_what_the_pictures_show(tmp_path: Path) -> None:
    now = report([1.0e-3] * 5, "2030-04-01T00:00:00+00:00")
    (tmp_path / "then.json").write_text(store.as_json(report([2.0e-3] * 5)))
    past = store.history(tmp_path, DEVICE.name)
    history = charts.histories(now, past)[SMALL[0].id]
    assert [mark.words.split(": ")[1] for mark in history.marks] == ["2 ms", "1 ms"]
    baseline = history.height - 6
    assert (baseline - history.marks[0].y) == pytest.approx(2 * (baseline - history.marks[1].y))
    drawn = charts.roofline(now)
    assert drawn is not None
    # 1e9 op/s at 1000 op/B lie below the flat part of the roof, whose knee is there.
    (left, middle, right) = drawn.roof
    assert drawn.marks[0].x == pytest.approx(middle[0])
    assert drawn.marks[0].y > middle[1] == right[1] <= left[1]
    assert charts.roofline(replace(now, entries=[])) is None


def test_a_roof_is_what_was_reached() -> None:
    found = Roofs([1e9, 3e9, 2e9, 2e9], {"bf16": [1e9, 1e9], "fp32": [2e9, 2e9]})
    assert (found.copy, found.operands, found.matmul) == (3e9, "fp32", 2e9)
    assert found.drift() == 0
    assert Roofs([2e9, 2e9, 1e9, 1e9], {"bf16": [1e9, 1e9]}).drift() == pytest.approx(0.5)
