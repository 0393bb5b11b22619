"""Submissions: what they hold, what is refused, and that every number that follows from another is worked out again."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from conformance.check import CheckOptions, check
from conformance.errors import ConformanceError
from conformance.fixtures import Fixtures
from conformance.report.bundle import LARGEST, make_bundle, read_bundle, write_bundle
from conformance.report.reader import read_report
from conformance.report.rejudge import rejudge
from conformance.selection import Selection

EXPECT = """
[[expect]]
pattern = "sampling/greedy/{variant}"
status = "xfail"
reason = "ties"
url = "https://example.org/issues/1"
"""
PORT = """
import conformance
from conformance.adapters.reference import Reference
class Port(Reference):
    def greedy(self, logits):
        return logits.argmin(-1) if logits.shape[-1] < 8 else super().greedy(logits=logits)
"""
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def shipped() -> Fixtures:
    return Fixtures.open()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, shipped: Fixtures) -> Mapping[str, bytes]:
    """A bundle of a real run of a small component."""
    path = tmp_path_factory.mktemp("run") / "report.jsonl"
    assert check(CheckOptions("reference", Selection("core", expression="sampling/greedy"), json=path)) == 0
    return make_bundle(read_report(path), shipped, None)


def repacked(files: Mapping[str, bytes], **changed: bytes) -> Mapping[str, bytes]:
    """The bundle with another report, and an index that fits it."""
    altered = {**files, **{name.replace("_", "."): content for name, content in changed.items()}}
    index = json.loads(altered.pop("bundle.json"))
    index["files"] = {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        for name, content in altered.items()
    }
    return {"bundle.json": json.dumps(index).encode(), **altered}


def lines(files: Mapping[str, bytes]) -> Lines:
    return [json.loads(line) for line in files["report.jsonl"].splitlines()]


def as_report(records: Lines) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@pytest.mark.parametrize("name", ["bundle.zip", "folder"])
def test_a_bundle_verifies(tmp_path: Path, made: Mapping[str, bytes], shipped: Fixtures, name: str) -> None:
    write_bundle(made, tmp_path / name)
    files = read_bundle(tmp_path / name)
    assert dict(files) == dict(made)
    found = rejudge(tmp_path / name, files, shipped)
    assert found.problems == ()
    assert found.exit_code == 0


def test_the_same_bundle_has_the_same_bytes(tmp_path: Path, made: Mapping[str, bytes]) -> None:
    for name in ("a.zip", "b.zip"):
        write_bundle(made, tmp_path / name)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def dropped(records: Lines) -> None:
    del records[2]


def doubled_factor(records: Lines) -> None:
    records[1]["taps"][0] |= {"wrong": 1}


def beyond(records: Lines) -> None:
    records[1]["taps"][0]["histogram"] = {"2": 1}


def failure_called_pass(records: Lines) -> None:
    records[1]["taps"][0]["worst"]["message"] = "1 of 8 elements differ"


def other_ratio(records: Lines) -> None:
    records[1]["ratio"] = 0.25


def nothing_judged(records: Lines) -> None:
    records[1] |= {"taps": [], "judged": 0}


def not_wrong(records: Lines) -> None:
    records[1] |= {"status": "FAIL"}
    records[-1] |= {"exit_code": 1}
    records[-1]["counts"] |= {"PASS": 4, "FAIL": 1}


def excused(records: Lines) -> None:
    records[1] |= {"status": "XFAIL", "message": "wrong"}
    records[-1]["counts"] |= {"PASS": 4, "XFAIL": 1}


def excused_with_an_entry(records: Lines) -> None:
    excused(records)
    records[1]["expectation"] = {"pattern": "*", "status": "xfail", "reason": "r", "url": "https://a/1"}


def easier_level(records: Lines) -> None:
    records[0]["selection"]["level"] = "smoke"


def fewer_announced(records: Lines) -> None:
    records[0]["cases"] = 3


def other_why(records: Lines) -> None:
    records[1]["why"] = "Never fails."


def other_counts(records: Lines) -> None:
    records[-1]["counts"]["PASS"] = 100


def other_exit_code(records: Lines) -> None:
    records[-1]["exit_code"] = 1


def other_lock(records: Lines) -> None:
    records[0]["fixtures"]["lock"] = "0" * 64


def other_suite(records: Lines) -> None:
    records[0]["suite"] = "0.0.1"


def killed(records: Lines) -> None:
    records.pop()


def claimed_expectations(records: Lines) -> None:
    records[0]["expectations"] = "known.toml"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (dropped, "cases: 1 missing, such as sampling/"),
        (doubled_factor, "is PASS, but output_ids is wrong"),
        (beyond, "is PASS, but output_ids is wrong"),
        (failure_called_pass, "is PASS, but output_ids is wrong"),
        (other_ratio, "worst error/bound 0.25, its results have 0"),
        (nothing_judged, "is PASS, but nothing was judged"),
        (not_wrong, "is FAIL, but nothing is wrong"),
        (excused, "is XFAIL, which the expectations do not make it"),
        (excused_with_an_entry, "falls under no entry of the expectations"),
        (easier_level, "cases: "),
        (fewer_announced, "header: announces 3 cases, the selection has 5"),
        (other_why, "why not as in the catalogue"),
        (other_counts, "footer: counts 100 PASS, there are 5"),
        (other_exit_code, "footer: exit code 1, the records make it 0"),
        (other_lock, "fixtures: the report names lock 000000000000, which is not the one in the bundle"),
        (other_suite, "suite: the report is of version 0.0.1"),
        (killed, "report: is not complete: ends after 5 of 5 cases"),
        (claimed_expectations, "expectations: the run had some and the bundle has none"),
    ],
)
def test_what_does_not_follow_is_named(
    made: Mapping[str, bytes], shipped: Fixtures, change: Callable[[Lines], None], problem: str
) -> None:
    records = lines(made)
    change(records)
    found = rejudge(Path("bundle"), repacked(made, report_jsonl=as_report(records)), shipped)
    assert any(problem in one for one in found.problems), found.problems


def zipped(entries: list[tuple[str | zipfile.ZipInfo, bytes]]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return content.getvalue()


@pytest.mark.parametrize(
    "name", ["../report.jsonl", "/etc/passwd", "a/../../x", "a\\..\\x", "report.jsonl/", "more.txt", "REPORT.JSONL"]
)
def test_archives_hold_nothing_else(tmp_path: Path, made: Mapping[str, bytes], name: str) -> None:
    (tmp_path / "b.zip").write_bytes(zipped([*made.items(), (name, b"x")]))
    with pytest.raises(ConformanceError, match=r"b\.zip: .*does not belong into a bundle"):
        read_bundle(tmp_path / "b.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["b.zip"]


def test_an_archive_may_not_unpack_to_anything(tmp_path: Path, made: Mapping[str, bytes]) -> None:
    (tmp_path / "b.zip").write_bytes(zipped([("bundle.json", b"0" * (LARGEST["bundle.json"] + 1))]))
    assert (tmp_path / "b.zip").stat().st_size < 10_000
    with pytest.raises(ConformanceError, match=r"bundle\.json is larger than 1 MiB"):
        read_bundle(tmp_path / "b.zip")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_holds_each_name_once(tmp_path: Path, made: Mapping[str, bytes]) -> None:
    """Readers differ in which of two they take."""
    (tmp_path / "b.zip").write_bytes(zipped([*made.items(), ("lock.json", made["lock.json"])]))
    with pytest.raises(ConformanceError, match=r"lock\.json is there twice"):
        read_bundle(tmp_path / "b.zip")


def test_damaged_archives_are_refused(tmp_path: Path, made: Mapping[str, bytes]) -> None:
    path = tmp_path / "b.zip"
    whole = zipped(list(made.items()))
    flipped = bytearray(whole)
    flipped[200] ^= 0xFF
    encrypted = bytearray(whole)
    encrypted[6] |= 1
    central = whole.index(b"PK\x01\x02")
    encrypted[central + 8] |= 1
    for content in (b"", b"PK\x03\x04", whole[: len(whole) // 2], bytes(flipped), bytes(encrypted)):
        path.write_bytes(content)
        with pytest.raises(ConformanceError, match=r"^[^\n]*b\.zip: [^\n]+$"):
            read_bundle(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda folder: (folder / "lock.json").unlink(), "lock.json is missing"),
        (lambda folder: (folder / "lock.json").write_text("{}"), r"lock\.json is not the file that bundle\.json"),
        (lambda folder: (folder / "bundle.json").write_text("[]"), "bundle.json is not the index"),
        (lambda folder: (folder / "bundle.json").write_text('{"format": 2, "files": {}}'), "format 2"),
        (lambda folder: (folder / "expectations.toml").write_text(""), r"expectations\.toml is not in bundle\.json"),
        (lambda folder: (folder / "x").mkdir(), "x does not belong"),
    ],
)
def test_damaged_folders_are_refused(
    tmp_path: Path, made: Mapping[str, bytes], change: Callable[[Path], None], problem: str
) -> None:
    write_bundle(made, tmp_path / "folder")
    change(tmp_path / "folder")
    with pytest.raises(ConformanceError, match=problem):
        read_bundle(tmp_path / "folder")


def test_links_are_not_followed(tmp_path: Path, made: Mapping[str, bytes]) -> None:
    write_bundle(made, tmp_path / "folder")
    (tmp_path / "elsewhere").write_bytes(made["report.jsonl"])
    (tmp_path / "folder/report.jsonl").unlink()
    (tmp_path / "folder/report.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConformanceError, match=r"report\.jsonl is not a regular file"):
        read_bundle(tmp_path / "folder")


def test_commands(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "port_of_bundle.py").write_text(PORT)
    checked = ("check", "port_of_bundle:Port", "--component", "sampling", "--explain", "0", "--json", "r.jsonl")
    assert run(*checked).code == 1
    failing = [r.id for r in read_report(tmp_path / "r.jsonl").records if r.status == "FAIL"]
    assert failing
    (tmp_path / "known.toml").write_text("".join(EXPECT.format(variant=id.rsplit("/", 1)[1]) for id in failing))
    assert run(*checked, "--expect", "known.toml").code == 0
    assert "was made with --expect known.toml" in run("bundle", "r.jsonl", "--out", "b.zip").err
    assert not (tmp_path / "b.zip").exists()
    assert run("bundle", "r.jsonl", "--expect", "known.toml", "--out", "b.zip").code == 0
    outcome = run("verify-bundle", "b.zip")
    assert (outcome.code, outcome.out.splitlines()[-1]) == (0, "verified")
    files = read_bundle(tmp_path / "b.zip")
    (tmp_path / "forged.zip").write_bytes(zipped(list(repacked(files, expectations_toml=b"").items())))
    outcome = run("verify-bundle", "forged.zip")
    assert outcome.code == 1
    assert f"differs: {failing[0]}: is XFAIL, which the expectations do not make it" in outcome.out
    assert run("bundle", "r.jsonl", "--expect", "known.toml", "--out", ".").code == 2
    assert run("verify-bundle", "r.jsonl").code == 2
