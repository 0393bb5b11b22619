"""The examples of `ci/examples`: built, run as their readers would run them, and right in what they have."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from folders import NORM, PACKED, STEPS, case_of, everything, export_cases
from planted_faults import PLANTED

from conformance.adapters.process import ProcessSession, open_process
from conformance.check import CheckOptions, check
from conformance.interface import COMPONENTS, METHODS
from conformance.runner import run_case
from conformance.selection import Selection, of_reading, select

EXAMPLES = Path(__file__).resolve().parents[2] / "ci" / "examples"
NUMPY = f"cmd:{sys.executable} {EXAMPLES / 'numpy_port' / 'harness.py'}"
PLANTING = Path(__file__).with_name("planted_faults.py")

HONESTLY_UNSUPPORTED = ("several tokens after position 0", "requests at different positions", "is not implemented")
QUICK = {
    "quantize": "not every and not trace",
    "hyper_connections": "not trace and not coefficients/",
    "indexer": "not more-visible and not trace",
    "sparse_attention": "not sink-and-listed-rows",
    "attention": "decode-from-first-token or projection or latent",
    "experts": "lattice or clamps",
    "block": "decode-from-first-token",
    "stack": "prefill-2-tokens",
    "model": "prefill-2-tokens or head or embed or parameter-counts",
}
"""What to run of the components whose cases take long."""


@pytest.fixture(scope="module")
def numpy_session() -> Iterator[ProcessSession]:
    session = open_process(NUMPY)
    yield session
    session.close()


def statuses(session: ProcessSession, component: str, expression: str | None = None) -> Counter[str]:
    cases = of_reading(select(everything()[1], Selection("core", expression, (component,))), "intended")
    results = [run_case(case, session) for case in cases]
    unsupported = {result.message for result in results if result.status == "UNSUPPORTED"}
    assert all(message.endswith(HONESTLY_UNSUPPORTED) for message in unsupported), unsupported
    return Counter(result.status for result in results)


# numpy


@pytest.mark.parametrize("component", [name for name in COMPONENTS if name not in ("vision", "dspark")])
def test_numpy_conforms_in_what_it_supports(numpy_session: ProcessSession, component: str) -> None:
    counts = statuses(numpy_session, component, QUICK.get(component))
    assert counts["PASS"]
    assert counts.keys() <= {"PASS", "UNSUPPORTED"}


def test_numpy_has_every_method_of_the_text_model(numpy_session: ProcessSession) -> None:
    others = {"vision", "dspark"}
    text = [name for name, method in METHODS.items() if method.component not in others]
    missing = [name for name in text if not numpy_session.supports(name)]
    assert set(missing) <= {"roll_back", "save_state", "restore_state", "sample", "draws"}


def test_numpy_makes_weights_of_the_recipe_itself(numpy_session: ProcessSession) -> None:
    for case_id in ("gate/six-of-384-with-image-bias/released-width", "window/rows/released-width"):
        assert run_case(case_of(case_id), numpy_session).status == "PASS"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("numpy_port/*.py")), ids=lambda path: path.name)
def test_numpy_needs_nothing_but_numpy(path: Path) -> None:
    own = {module.stem for module in path.parent.glob("*.py")}
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    foreign = {name.partition(".")[0] for name in imported} - own - set(sys.stdlib_module_names)
    assert foreign <= {"numpy"}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_rejected(name: str) -> None:
    session = open_process(f"cmd:{sys.executable} {PLANTING} {name}")
    try:
        assert run_case(case_of(PLANTED[name].case), session).status == "FAIL"
    finally:
        session.close()


# C


@pytest.fixture(scope="module")
def c_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy, so that the checkout stays as it is."""
    if shutil.which("gcc") is None or shutil.which("make") is None:
        pytest.skip("no gcc or no make on this machine")
    folder = Path(shutil.copytree(EXAMPLES / "c_port", tmp_path_factory.mktemp("c") / "port"))
    for target in ("harness", "sanitized"):
        (folder / target).unlink(missing_ok=True)
        subprocess.run(["make", "CC=gcc", target], cwd=folder, check=True, capture_output=True, timeout=120)
    return folder


@pytest.mark.parametrize("program", ["harness", "sanitized"])
def test_c_conforms_in_what_it_supports(c_folder: Path, program: str) -> None:
    session = open_process(f"cmd:{c_folder / program}")
    try:
        for component in ("quantize", "window", "candidates", "engram"):
            counts = statuses(session, component)
            assert counts["PASS"] > counts["UNSUPPORTED"]
            assert counts.keys() <= {"PASS", "UNSUPPORTED"}
    finally:
        session.close()


def test_c_leaks_no_memory_and_answers_a_folder_by_pipe(c_folder: Path, tmp_path: Path) -> None:
    """A case's commands are what a harness reads: no program is needed in between."""
    case_ids = (PACKED, "window/ring/steps-across-wraps", "engram/hash/text", NORM)
    folder = export_cases(tmp_path / "questions", *case_ids)
    for case_id in case_ids:
        with (
            (folder / "cases" / case_id / "commands.jsonl").open("rb") as commands,
            (folder / "results" / case_id / "replies.jsonl").open("wb") as replies,
        ):
            done = subprocess.run(
                [c_folder / "sanitized"], cwd=folder, stdin=commands, stdout=replies, stderr=subprocess.PIPE, timeout=60
            )
        assert (done.returncode, done.stderr) == (0, b"")
    report = tmp_path / "report.jsonl"
    assert check(CheckOptions(f"dir:{folder}", Selection("full"), json=report)) == 0
    records = map(json.loads, report.read_text().splitlines())
    found = {record["id"]: record["status"] for record in records if record["type"] == "case"}
    assert found == {**dict.fromkeys(case_ids, "PASS"), NORM: "UNSUPPORTED"}


def asked(method: str, **arguments: object) -> str:
    request = {"kind": "call", "method": method, "returns": [], "arguments": arguments}
    return json.dumps({"seq": 1, "command": "run", "request": request, "results": "/nowhere/at-all"})


ABSENT = {"file": "/nowhere", "name": "x", "dtype": "BF16", "shape": [2, 32], "offset": 0, "bytes": 128}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[1, 2",
        "[" * 100_000,
        '{"seq": 1, "command": "run"}',
        '{"seq": 1, "x": "\\ud83d\\ude00 \\u00e9 \\n", "command": "describe"}',
        asked("quantize_fp8"),
        asked("quantize_fp8", x={"tensor": ABSENT}),
        asked("window_indices", config=3),
        asked("window_indices", config={"value": {"window_size": 4}}, start_pos={"value": 0}, length={"value": 3}),
        asked("engram_layout"),
    ],
    ids=range(11),
)
def test_c_survives_commands_that_are_none(c_folder: Path, line: str) -> None:
    done = subprocess.run([c_folder / "sanitized"], input=f"{line}\n".encode(), capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["status"] in ("ok", "error", "unsupported")


# A folder


def test_the_folder_example_answers_what_it_has(tmp_path: Path) -> None:
    continued = "compressor/groups-ratio-2/continued-in-pieces"
    vision = "vision/merge/image-inside-prompt"
    folder = export_cases(tmp_path / "questions", NORM, PACKED, STEPS, continued, vision)
    subprocess.run([sys.executable, EXAMPLES / "folder_port.py", folder], check=True, timeout=300)
    report = tmp_path / "report.jsonl"
    assert check(CheckOptions(f"dir:{folder}", Selection("full"), json=report)) == 0
    header, *records, footer = map(json.loads, report.read_text().splitlines())
    assert header["implementation"]["name"] == "numpy example"
    found = {record["id"]: (record["status"], record["message"]) for record in records}
    assert all(found[case_id][0] == "PASS" for case_id in (NORM, PACKED, STEPS))
    assert found[continued] == ("UNSUPPORTED", "several tokens after position 0")
    assert found[vision][0] == "UNSUPPORTED"
    assert found[vision][1].endswith("is not implemented")
    assert footer["exit_code"] == 0
