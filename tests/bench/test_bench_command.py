"""`conformance bench` from the command line: what gets a number, what does not, and what cannot be run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench_runs import DEVICE
from cli_runs import Run

TINY = ("--shapes", "tiny.toml")


def benchmarks(path: Path) -> list[Any]:
    found: list[Any] = json.loads(path.read_text())["benchmarks"]
    return found


@pytest.mark.parametrize("port", ["Right", "Numpy"])
def test_a_right_port_gets_a_number(run: Run, port: str, tmp_path: Path) -> None:
    done = run("--target", f"bench_ports:{port}", *TINY, "--json", "times.json")
    assert done.code == 0
    assert "device   a device" in done.out
    assert "1 measured" in done.out
    assert "goal ≥1e-06 % copy or <0.001 µs" in done.out
    (stored,) = benchmarks(tmp_path / "times.json")
    assert stored["extra_info"]["device"] == DEVICE.name
    assert stored["extra_info"]["id"] == "rms_norm/tiny"
    assert stored["stats"]["rounds"] == len(stored["stats"]["data"]) >= 5
    assert min(stored["stats"]["data"]) > 0


@pytest.mark.parametrize(
    ("port", "why"),
    [
        ("Wrong", "elements beyond their bound"),
        ("Raising", "ZeroDivisionError: on to lines"),
        ("LazyOnceTimed", "out (composed)"),
        ("WrongOnceTimed", "elements beyond their bound"),
        ("RaisingOnceTimed", "MemoryError: no room"),
        ("UnsupportedOnceTimed", "unsupported only once it was timed: Unsupported: not now"),
        ("Nothing", "out: TypeError: a NoneType is neither torch, numpy nor DLPack"),
        ("Sparse", "out: RuntimeError"),
        ("Remembering", "elements beyond their bound"),
        ("InPlace", "the input x was modified in place"),
        ("InsideItsInput", "a result lies in the memory of an input"),
    ],
)
def test_a_wrong_port_is_refused_a_number(run: Run, port: str, why: str, tmp_path: Path) -> None:
    done = run("--target", f"bench_ports:{port}", *TINY, "--json", "times.json")
    assert done.code == 1
    assert "REFUSED: its results are wrong" in done.out
    assert why in done.out
    assert "1 refused" in done.out
    assert benchmarks(tmp_path / "times.json") == []


def test_what_a_port_does_not_have_is_unsupported(run: Run) -> None:
    done = run("--target", "bench_ports:Right", "gate")
    assert done.code == 1
    assert "unsupported: gate" in done.out
    assert "1 unsupported" in done.out


def test_two_subjects_are_measured_by_turns(run: Run) -> None:
    done = run(
        "--target", "bench_ports:Right", *TINY, "--against", "bench_ports:Slow", "--against", "bench_ports:Wrong"
    )
    assert done.code == 0
    assert "against bench_ports:Slow: " in done.out
    assert "times as fast (2" in done.out
    assert "against bench_ports:Wrong: refused: out (composed)" in done.out


def test_a_rival_that_fails_while_it_is_timed_leaves_the_subject_its_number(run: Run) -> None:
    done = run("--target", "bench_ports:Right", *TINY, "--against", "bench_ports:RaisingOnceTimed")
    assert done.code == 0
    assert "against bench_ports:RaisingOnceTimed: refused: the call raised MemoryError: no room" in done.out
    assert "1 measured" in done.out


def test_an_interrupted_run_leaves_earlier_files(run: Run, tmp_path: Path) -> None:
    (tmp_path / "times.json").write_text("earlier")
    done = run("--target", "bench_ports:Interrupted", *TINY, "--json", "times.json")
    assert done.code == 130
    assert done.err == "conformance: interrupted; files of earlier runs are as they were\n"
    assert (tmp_path / "times.json").read_text() == "earlier"


def test_sizes_are_told_before_anything_is_measured(run: Run, tmp_path: Path) -> None:
    declared = (tmp_path / "tiny.toml").read_text()
    odd = '[[shape]]\nkernel = "quantize_fp8"\nname = "odd"\nset = "small"\nsizes = { tokens = 8, width = 33 }\n'
    (tmp_path / "odd.toml").write_text(declared + odd)
    done = run("--target", "bench_ports:Right", "--shapes", "odd.toml")
    assert "quantize_fp8/odd: width = 33 is not a multiple of 32" in done.error
    assert done.out == ""


def test_a_slowed_kernel_is_flagged_against_its_baseline(run: Run) -> None:
    assert run("--target", "bench_ports:Right", *TINY, "--json", "then.json").code == 0
    slow = run("--target", "bench_ports:Slow", *TINY, "--against", "then.json", "--fail-if-slower", "50%")
    assert slow.code == 1
    assert "SLOWER: " in slow.out
    assert "50 % are allowed" in slow.out
    assert "1 measured, 1 slower than allowed" in slow.out
    assert run("--target", "bench_ports:Slow", *TINY, "--against", "then.json").code == 0


def test_a_changed_declaration_is_not_compared(run: Run, tmp_path: Path) -> None:
    assert run("--target", "bench_ports:Right", *TINY, "--json", "then.json").code == 0
    declared = (tmp_path / "tiny.toml").read_text()
    (tmp_path / "tiny.toml").write_text(declared.replace("tokens = 8", "tokens = 9"))
    done = run("--target", "bench_ports:Right", *TINY, "--against", "then.json")
    assert done.code == 0
    assert "against then.json: not stored, or declared otherwise then" in done.out
    failing = run("--target", "bench_ports:Slow", *TINY, "--against", "then.json", "--fail-if-slower", "10%")
    assert "then.json: holds none of these benchmarks as they are declared now" in failing.error


def test_another_device_is_not_compared(run: Run, tmp_path: Path) -> None:
    assert run("--target", "bench_ports:Right", *TINY, "--json", "then.json").code == 0
    stored = json.loads((tmp_path / "then.json").read_text())
    stored["benchmarks"][0]["extra_info"]["device"] = "another"
    (tmp_path / "then.json").write_text(json.dumps(stored))
    done = run("--target", "bench_ports:Slow", *TINY, "--against", "then.json", "--fail-if-slower", "10%")
    assert "then.json: measured on another, this is a device: numbers of other devices do not compare" in done.error


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--target", "cmd:true"), "a process answers through files: its kernels cannot be timed from here"),
        (("--target", "dir:x"), "a folder was filled elsewhere"),
        (("--target", "bench_ports:Interpreted"), "its kernels are interpreted here"),
        (("--target", "bench_ports:None"), "bench_ports:None"),
        (("--target", ""), "unknown target ''"),
        (("--shapes", ""), "--shapes : neither small"),
        (("suite", "start", "--html", "page.html"), "--html is for kernels, not for `bench suite`"),
        (("--counts", "--json", "times.json"), "--counts measures nothing that --json or --html could hold"),
        (("--json", "one", "--html", "./one"), "--json and --html name the same file: one"),
        (("--shapes", "no-such"), "--shapes no-such: neither small, decode, prefill, released nor a file"),
        (("no_such_kernel",), "no kernel no_such_kernel at small shapes: compressed_rows, engram_hash"),
        (("--fail-if-slower", "10%"), "--fail-if-slower needs one stored baseline: --against FILE.json"),
        (("--against", "x.json"), "x.json: cannot be read: No such file"),
        (("--against", "x.json", "--fail-if-slower", "much"), "--fail-if-slower much: expected a percentage"),
        (("--history", "."), "--history is drawn in the page of --html"),
        (("--html", "page.html", "--history", "none"), "none: not a directory"),
        (("--json", "missing/times.json"), "--json missing/times.json: cannot be written"),
        (("--device", "tpu"), "--device"),
        (("--target", "upstream:none", "--yes"), "target 'upstream:none': none: not a directory"),
    ],
)
def test_what_cannot_be_run_is_one_line(run: Run, arguments: tuple[str, ...], why: str) -> None:
    assert why in run(*arguments).error


def test_counts_run_nothing(run: Run) -> None:
    done = run("--counts", "--target", "no.such:Target", *TINY)
    assert done.code == 0
    assert done.out == (
        "rms_norm/tiny: 2.05 kop, 2.05 kB moved, 1 op/B; goal on a device: ≥1e-06 % copy or <0.001 µs\n"
    )


def test_too_large_for_the_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(DEVICE), "free_bytes", lambda self: 3 << 10)
    done = run("--target", "bench_ports:Right", *TINY)
    assert done.code == 1
    assert "skipped: its inputs take 2.18 kB, more than half of the 3.07 kB that are free" in done.out


def test_far_too_large_for_the_machine(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(DEVICE), "free_bytes", lambda self: 1 << 30)
    declared = (tmp_path / "tiny.toml").read_text()
    (tmp_path / "tiny.toml").write_text(
        declared.replace("tokens = 8", f"tokens = {1 << 22}").replace("= 64", "= 65536")
    )
    done = run("--target", "bench_ports:Right", *TINY)
    assert done.code == 1
    assert "skipped: its arguments and results take 1.1 TB, and " in done.out


def test_the_page(run: Run, tmp_path: Path) -> None:
    (tmp_path / "past").mkdir()
    for name in ("one", "two"):
        assert run("--target", "bench_ports:Right", *TINY, "--json", f"past/{name}.json").code == 0
    (tmp_path / "past" / "other.json").write_text("{}")
    done = run("--target", "bench_ports:Right", "--html", "page.html", "--history", "past", *TINY)
    assert done.code == 0
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page
    assert "Roofline" in page
    assert "3 runs, the latest" in page
    assert "rms_norm/tiny" in page
    assert "http" not in page
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 2
    for picture in pictures:
        assert ElementTree.fromstring(picture).attrib["role"] == "img"


def test_a_page_escapes_what_a_port_says(run: Run, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "import bench_ports, conformance\n"
        "class Port(bench_ports.Right):\n"
        "    def describe(self): return conformance.Description('<script>alert(1)</script>\\x1b[2J', '1')\n"
    )
    done = run("--target", "loud:Port", "--html", "page.html", *TINY)
    assert done.code == 0
    assert "\x1b" not in done.out
    assert "<script>" not in (tmp_path / "page.html").read_text()
