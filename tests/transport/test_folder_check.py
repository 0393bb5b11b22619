"""`check dir:DIR`: right and wrong answers, missing and half ones, and folders from elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from folders import (
    NORM,
    PACKED,
    SEVERAL,
    STEPS,
    answer,
    commands,
    everything,
    export_cases,
    judge,
    results_path,
    write_replies,
    write_results,
)

from conformance.adapters.folder import open_folder
from conformance.check import CheckOptions, check
from conformance.errors import ConformanceError, TargetError
from conformance.selection import Selection
from conformance.tensors import SafetensorsFile, Tensor


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = export_cases(tmp_path_factory.mktemp("answered") / "questions", *SEVERAL)
    answer(folder, *SEVERAL)
    return folder


@pytest.fixture
def folder(answered: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(answered, tmp_path / "questions"))


def run(folder: Path, report: Path, expression: str | None = None) -> tuple[int, dict[str, dict[str, object]]]:
    code = check(CheckOptions(f"dir:{folder}", Selection("full", expression), json=report))
    records = [json.loads(line) for line in report.read_text().splitlines()]
    return code, {record["id"]: record for record in records if record["type"] == "case"}


def edit_manifest(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# Answers


def test_right_answers_conform_and_only_the_folders_cases_are_judged(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, records = run(folder, tmp_path / "report.jsonl")
    assert code == 0
    assert {case_id: record["status"] for case_id, record in records.items()} == dict.fromkeys(SEVERAL, "PASS")
    assert "3 cases by suite" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("case_id", "step", "name"), [(NORM, 0, "out"), (PACKED, 0, "codes"), (STEPS, 3, "attn_out")])
def test_a_wrong_number_fails(folder: Path, case_id: str, step: int, name: str) -> None:
    results = dict(SafetensorsFile(results_path(folder, case_id, step)))
    data = results[name].data.copy()
    data.flat[np.argmax(np.abs(results[name].values()))] ^= data.dtype.type(1 << (data.itemsize * 8 - 1))
    write_results(folder, case_id, step, {**results, name: Tensor(results[name].dtype, data)})
    assert judge(folder, case_id).status == "FAIL"


def test_bits_of_another_type_are_read_as_the_reply_says(folder: Path) -> None:
    out = SafetensorsFile(results_path(folder, NORM))["out"]
    write_results(folder, NORM, 0, {"bits": Tensor("U8", out.data.view(np.uint8))})
    write_replies(folder, NORM, {"status": "ok", "results": {"out": {"name": "bits", "dtype": "BF16"}}})
    result = judge(folder, NORM)
    assert (result.status, "does not hold the bits of BF16" in result.message) == ("FAIL", True)
    results = dict(SafetensorsFile(results_path(folder, PACKED)))
    scales = Tensor("U8", results["scales"].data)
    write_results(folder, PACKED, 0, {"codes": results["codes"], "s": scales})
    write_replies(
        folder, PACKED, {"status": "ok", "results": {"codes": {}, "scales": {"name": "s", "dtype": "F8_E4M3"}}}
    )
    assert judge(folder, PACKED).status == "PASS"


def test_replies_say_what_is_unsupported_or_failed(folder: Path) -> None:
    write_replies(folder, NORM, {"status": "unsupported", "message": "no norms today"})
    assert (judge(folder, NORM).status, judge(folder, NORM).message) == ("UNSUPPORTED", "no norms today")
    write_replies(folder, PACKED, {"status": "error", "message": "out of memory"})
    assert (judge(folder, PACKED).status, judge(folder, PACKED).message) == ("CRASH", "step 0: out of memory")


def test_state_may_be_kept_to_oneself(folder: Path) -> None:
    lines = commands(folder, STEPS)[:-1]
    replies: list[dict[str, object]] = []
    for line in lines:
        kind, path = line["request"]["kind"], results_path(folder, STEPS, line["seq"])
        names = list(SafetensorsFile(path)) if path.exists() else []
        unsupported = {"status": "unsupported"}
        replies.append(unsupported if kind == "state" else {"status": "ok", "results": {name: {} for name in names}})
    assert unsupported in replies
    write_replies(folder, STEPS, *replies)
    assert judge(folder, STEPS).status == "PASS"


def test_a_description_names_the_port_and_rules_methods_out(folder: Path) -> None:
    said = {"name": "mine", "version": "3", "methods": ["rms_norm"], "conventions": {"layout": "packed"}}
    (folder / "results" / "describe.json").write_text(json.dumps(said))
    description = open_folder(f"dir:{folder}").describe()
    assert (description.name, description.version, description.conventions["layout"]) == ("mine", "3", "packed")
    assert judge(folder, NORM).status == "PASS"
    assert judge(folder, PACKED).message == "quantize_fp4_e4m3 is not implemented"


# Missing and half answers


@pytest.mark.parametrize("missing", ["a step", "the state", "everything"])
def test_a_missing_answer_is_unsupported_never_a_pass(folder: Path, missing: str) -> None:
    numbers = {
        "a step": [3],
        "the state": [len(commands(folder, STEPS)) - 2],
        "everything": range(len(commands(folder, STEPS))),
    }[missing]
    for number in numbers:
        results_path(folder, STEPS, number).unlink(missing_ok=missing == "everything")
    result = judge(folder, STEPS)
    assert result.status == "UNSUPPORTED"
    assert "no result" in result.message


def test_replies_that_end_early_leave_the_case_unanswered(folder: Path) -> None:
    write_replies(folder, STEPS, {"status": "ok"})
    assert judge(folder, STEPS).status == "UNSUPPORTED"


def test_a_folder_answered_in_part_is_judged_in_part(folder: Path, tmp_path: Path) -> None:
    shutil.rmtree(folder / "results" / STEPS)
    code, records = run(folder, tmp_path / "report.jsonl")
    assert (code, records[NORM]["status"], records[STEPS]["status"]) == (0, "PASS", "UNSUPPORTED")
    code, records = run(folder, tmp_path / "report.jsonl", STEPS)
    assert (code, records.keys()) == (1, {STEPS})


def _as_link(path: Path) -> None:
    moved = path.rename(path.with_name("moved"))
    path.symlink_to(moved)


def _as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated"),
    "cut in the header": (lambda path: path.write_bytes(path.read_bytes()[:20]), "truncated"),
    "empty": (lambda path: path.write_bytes(b""), "truncated"),
    "no header": (lambda path: path.write_bytes(b"\xff" * 64), "truncated"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"more"), "after the last tensor"),
    "4 MB of header": (lambda path: path.write_bytes((1 << 22).to_bytes(8, "little") + b" " * (1 << 22)), "the limit"),
    "nested": (lambda path: path.write_bytes((9).to_bytes(8, "little") + b"[[[[[[[[["), "not valid JSON"),
    "link": (_as_link, "is a symbolic link"),
    "folder is a link": (lambda path: _as_link(path.parent), "is a symbolic link"),
    "pipe": (_as_pipe, "not a regular file"),
    "folder": (_as_folder, "not a regular file"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_answer_is_one_clear_failure(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(results_path(folder, NORM))
    result = judge(folder, NORM)
    assert result.status == "PROTOCOL"
    assert "results/norm/rms-vectors" in result.message
    assert message in result.message
    assert len(result.message.splitlines()) == 1
    assert judge(folder, PACKED).status == "PASS"


def test_half_a_reply_is_a_failure(folder: Path) -> None:
    path = folder / "results" / NORM / "replies.jsonl"
    path.write_text('{"seq": 0, "sta')
    result = judge(folder, NORM)
    assert (result.status, "replies.jsonl" in result.message) == ("PROTOCOL", True)


def test_more_replies_than_commands_are_a_failure(folder: Path) -> None:
    write_replies(folder, NORM, *[{"status": "ok", "results": {"out": {}}}] * 3)
    assert "3 replies to 2 commands" in judge(folder, NORM).message


# Folders from elsewhere


def refusal(folder: Path) -> str:
    """The line with which a run does not begin."""
    with pytest.raises(ConformanceError) as caught:
        check(CheckOptions(f"dir:{folder}", Selection("full")))
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_other_fixtures_are_refused_naming_both(folder: Path) -> None:
    edit_manifest(folder, lock="0123456789abcdef")
    line = refusal(folder)
    assert "0123456789abcdef" in line
    assert everything()[0].lock_hash in line


def test_another_version_that_asks_the_same_is_judged(folder: Path) -> None:
    edit_manifest(folder, suite="9.9.9")
    assert judge(folder, NORM).status == "PASS"
    assert "9.9.9" in open_folder(f"dir:{folder}").describe().conventions["exported"]


def test_cases_that_ask_something_else_by_now_are_not_judged(folder: Path) -> None:
    cases = json.loads((folder / "manifest.json").read_text())["cases"]
    for case in cases:
        if case["id"] == NORM:
            case["questions"] = "0" * 64
    edit_manifest(folder, suite="0.0.1", cases=cases)
    result = judge(folder, NORM)
    assert result.status == "UNSUPPORTED"
    assert "other questions than those in the folder, exported by suite 0.0.1" in result.message
    assert judge(folder, PACKED).status == "PASS"


def test_cases_that_are_gone_are_left_out(folder: Path, tmp_path: Path) -> None:
    cases = json.loads((folder / "manifest.json").read_text())["cases"]
    edit_manifest(folder, cases=[*cases, {**cases[0], "id": "norm/of-old/now-gone"}])
    code, records = run(folder, tmp_path / "report.jsonl")
    assert (code, records.keys()) == (0, set(SEVERAL))


def test_a_folder_without_an_answer_is_refused(tmp_path: Path) -> None:
    folder = export_cases(tmp_path / "questions", NORM)
    assert "no answers yet" in refusal(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not a folder that `conformance export` has finished"),
        ("{", "not valid JSON"),
        ("[]", "is not of type 'object'"),
        ('{"format": 2}', "format 2, this suite reads 1"),
        ('{"format": 1, "suite": "1", "lock": 3, "selection": {}, "cases": []}', "lock"),
        ('{"format": 1, "suite": "1", "lock": "a", "selection": {}, "cases": [{"id": "x"}]}', "cases 0"),
    ],
)
def test_a_damaged_manifest_is_one_line(folder: Path, content: str | None, message: str) -> None:
    path = folder / "manifest.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(TargetError) as caught:
        open_folder(f"dir:{folder}")
    assert message in str(caught.value)
    assert "manifest.json" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("said", ["[]", "{", '{"methods": ["no_such"]}', '{"reading": "loud"}', '{"name": ""}'])
def test_a_damaged_description_is_one_line(folder: Path, said: str) -> None:
    (folder / "results" / "describe.json").write_text(said)
    with pytest.raises(TargetError) as caught:
        open_folder(f"dir:{folder}")
    assert len(str(caught.value).splitlines()) == 1


def test_no_folder_at_all_is_one_line(tmp_path: Path) -> None:
    for target, message in ((f"dir:{tmp_path / 'none'}", "is not a directory"), ("dir:", "no folder after dir:")):
        with pytest.raises(TargetError, match=message):
            open_folder(target)


def test_a_selection_that_the_folder_does_not_ask_is_refused(folder: Path) -> None:
    with pytest.raises(ConformanceError, match="none of the 1 selected cases is in the folder"):
        check(CheckOptions(f"dir:{folder}", Selection("full", "norm/rms/block-inputs")))


def test_a_link_in_place_of_the_results_is_refused(folder: Path) -> None:
    _as_link(folder / "results")
    assert "is a symbolic link" in refusal(folder)


# On the command line


def conformance(*words: str | Path) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", "conformance", *words], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_export_then_check_on_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "questions"
    code, out, err = conformance("export", folder, "-k", NORM)
    assert (code, err) == (0, "")
    assert out.startswith("wrote 1 case, 1 step,")
    assert conformance("check", f"dir:{folder}")[::2] == (
        2,
        f"conformance: target 'dir:{folder}': no answers yet: {folder / 'results'} has no file in it\n",
    )
    answer(folder, NORM)
    code, out, err = conformance("check", f"dir:{folder}")
    assert (code, err, "conforms: 1 of 1" in out) == (0, "", True)
    code, _, err = conformance("export", folder, "-k", NORM)
    assert (code, err.count("\n"), "exists already" in err) == (2, 1, True)
