"""The page of a run: complete, by itself, escaped, and built for eyes, keyboards and screen readers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from pathlib import Path

import made_reports
import pytest
from made_reports import element, header, record
from pages import parse

from conformance.report.html.run_page import run_page
from conformance.report.records import CaseRecord, ExpectationRecord, Header

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x00\x1b[31m\u202e{{7*7}}${x}"
LONG = "n" * 50_000
ENTRY = ExpectationRecord("gate/*", "xfail", "ties", "https://example.org/issues/1")
MANY = [
    record("rotary/pairs/a", "FAIL"),
    record("rotary/pairs/b"),
    record("block/plain/a", "FAIL", tap="h_out"),
    record("gate/ties/a", "XFAIL", expectation=ENTRY),
    record("gate/ties/b", "XPASS", expectation=ENTRY, message="passes, but is expected to fail"),
    record("moe/x/a", "UNSUPPORTED"),
    record("norm/x/a", "CRASH", message="RuntimeError: on fire"),
    record("norm/x/b", "BROKEN", message="the suite raised"),
    record("norm/x/c", "QUARANTINE", expectation=replace(ENTRY, status="quarantine")),
]


def page(*records: CaseRecord, killed: bool = False, **changes: object) -> str:
    head = header(**{"cases": len(records), **changes})  # type: ignore[arg-type]
    return run_page(head, records, None if killed else made_reports.footer(records))


@pytest.mark.parametrize("records", [MANY, [], [record("norm/rms/a")]], ids=["many", "none", "pass"])
def test_structure(records: list[CaseRecord]) -> None:
    text = page(*records)
    document = parse(text)
    everything = [one for tag in re.findall(r"<([a-z][a-z0-9]*)", text) for one in document.all(tag)]
    ids = [one.attributes["id"] for one in {id(one): one for one in everything}.values() if "id" in one.attributes]
    assert len(ids) == len(set(ids))
    assert all(link.attributes["href"][1:] in ids for link in document.all("a") if link.attributes["href"][0] == "#")
    levels = [int(tag[1]) for tag in re.findall(r"<(h[1-6])\b", text)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for table in document.all("table"):
        assert table.all("caption")[0].text.strip()
        assert all(cell.attributes.get("scope") for cell in table.all("th"))
    for drawing in document.all("svg"):
        assert drawing.attributes.get("aria-hidden") == "true" or (
            drawing.attributes["role"] == "img" and drawing.all("title")[0].text and drawing.all("desc")[0].text
        )
    for scrolled in [one for one in document.all("div") if "wide" in one.attributes.get("class", "")]:
        assert scrolled.attributes["tabindex"] == "0"
        assert scrolled.attributes["aria-label"]
    assert document.all("html")[0].attributes["lang"] == "en"
    assert document.all("a")[0].attributes["href"] == "#content"


def test_nothing_is_fetched_or_run() -> None:
    text = page(*MANY)
    assert not re.findall(r"<(?:script|iframe|object|embed|img)\b|@import|url\(", text)
    assert {link.attributes["href"] for link in parse(text).all("link")} == {"data:,"}
    assert not re.findall(r"\son[a-z]+=", text)


@pytest.mark.parametrize("hostile", [HOSTILE, LONG, "{% raw %}", "javascript://x.y/%0aalert(1)", "\ud800", "й" * 300])
def test_texts_of_ports_stay_texts(hostile: str) -> None:
    records = [
        record("gate/x/a", "FAIL", first_failure=element(where=hostile, message=hostile), why=hostile, rerun=hostile),
        record("gate/x/b", "CRASH", message=hostile, reached=hostile, source=hostile, spec=hostile, flags=(hostile,)),
        record(f"gate/x/{hostile}", "FAIL", tap=hostile, component=hostile),
        record("gate/x/d", "UNSUPPORTED", message=hostile),
        record("gate/x/e", "XFAIL", expectation=ExpectationRecord(hostile, "xfail", hostile, hostile)),
    ]
    described = {"name": hostile, "version": hostile, "language": hostile, "device": hostile, "homepage": hostile}
    conventions = {"conventions": {hostile: hostile}}
    text = page(*records, target=hostile, implementation={**described, **conventions}, environment={hostile: hostile})
    document = parse(text)
    assert not document.all("script")
    assert not document.all("img")
    assert "\x00" not in text
    assert "\u202e" not in text
    assert all(re.match("#|https?://", link.attributes["href"]) for link in document.all("a"))
    assert len(text) < 300_000


def test_the_title_is_the_verdict() -> None:
    title = parse(page(record("norm/rms/a"))).all("title")[0].text
    assert title == "my engine 1.0: Conforms (DeepSeek-V4.1-Flash conformance)"


@pytest.mark.parametrize(
    ("records", "killed", "word", "tone"),
    [
        ([record("norm/rms/a")], False, "Conforms", "good"),
        ([record("norm/rms/a", "FAIL")], False, "Does not conform", "bad"),
        ([record("norm/rms/a", "CRASH", message="x")], False, "Does not conform", "bad"),
        ([record("norm/rms/a", "UNSUPPORTED")], False, "No verdict", "warn"),
        ([record("norm/rms/a"), record("norm/rms/b", "BROKEN")], False, "No verdict", "warn"),
        ([record("norm/rms/a")], True, "Conforms", "warn"),
        ([record("norm/rms/a", "FAIL")], True, "Does not conform", "bad"),
        ([], False, "No verdict", "warn"),
    ],
)
def test_verdict(records: list[CaseRecord], killed: bool, word: str, tone: str) -> None:
    document = parse(page(*records, killed=killed))
    (box,) = [one for one in document.all("div") if "verdict" in one.attributes.get("class", "")]
    assert box.attributes["class"] == f"verdict {tone}"
    assert box.all("p")[0].text == word
    assert ("not complete" in document.text) == killed


def test_a_killed_run_does_not_read_as_a_pass() -> None:
    document = parse(page(record("norm/rms/a"), killed=True, cases=5))
    assert "No verdict" in document.text
    assert "1 of 5 cases" in document.text


def test_a_failure_says_all_that_is_known() -> None:
    text = parse(page(record("norm/rms/a", "FAIL"))).text
    for said in (
        "norm/rms/a",
        "3 of 8 elements beyond their bound",
        "layer 3, call 1, position 2, feature 5",
        "index 1, 2, 5",
        "0x3fc0",
        "0x3fa0",
        "0.25, bound 0.0625; worst error/bound 4",
        "Fails when the mean is taken in bf16.",
        "norm-sum-in-bf16: ",
        "conformance check my_port:Port -k norm/rms/a",
        "numerics.md 3",
    ):
        assert said in text, said


def test_every_list_is_there() -> None:
    text = parse(page(*MANY)).text
    for said in ("rms_norm is not implemented", "1 XFAIL", "1 XPASS", "1 QUARANTINE", "the suite raised", "on fire"):
        assert said in text, said
    assert "Nothing fell under an expectation" not in text


def test_what_cannot_fail_is_powerless() -> None:
    able = made_reports.tap()
    unable = replace(able, tap="free", histogram={"open": 8})
    document = parse(page(record("norm/rms/a", taps=(able, unable)), record("norm/rms/b", taps=(able,))))
    assert "1 results passed without a chance to fail" in document.text
    assert [li.text for li in document.all("li") if "elements" in li.text] == ["norm/rms/a, free: 8 elements"]


def test_first_divergence_is_the_earliest_layer_that_is_wrong_by_itself() -> None:
    def at(case_id: str, name: str, layer: int, ratio: float) -> CaseRecord:
        tap = made_reports.tap(name, ratio, layers=(layer,))
        status = "PASS" if ratio <= 1 else "FAIL"
        return record(case_id, status, taps=(tap,), ratio=ratio)

    document = parse(
        page(
            at("stack/x/a", "h_out", 1, 9.0),
            at("attention/x/a", "attn_out", 1, 0.5),
            at("attention/x/b", "attn_out", 2, 7.0),
            at("attention/x/c", "window_rows", 3, 8.0),
        )
    )
    sentence = next(p.text for p in document.all("p") if "is the first that is wrong" in p.text)
    assert sentence.startswith("Each step on recorded inputs, layer 2 is the first")
    assert "attention, attn_out, error/bound 7 in attention/x/b" in sentence
    assert len([one for one in document.all("rect") if "first" in one.attributes["class"].split()]) == 1


def test_heat_map_keeps_the_worst_of_each_cell_and_sets_apart() -> None:
    document = parse(
        page(
            record("norm/rms/a", taps=(made_reports.tap("out", 0.3, layers=(0, 1)),)),
            record("norm/rms/b", taps=(made_reports.tap("out", 0.7, layers=(1,)),)),
            record("norm/rms/c", taps=(made_reports.tap("out", 0.2, layers=(1,)),)),
            record("norm/rms/d", taps=(made_reports.tap("out", 0.9, layers=(1,)),), source="released/norm"),
        )
    )
    tiny, released = [table for table in document.all("table") if table.attributes.get("class") == "heat"]
    assert [cell.text for cell in tiny.all("td")] == [".30", ".70"]
    assert [cell.text for cell in released.all("td")] == [".90"]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1, 2], ids=["light", "dark", "print"])
def test_text_stands_out_from_what_is_behind_it(scheme: int) -> None:
    """WCAG 2.2, level AA: a contrast of 4.5 to 1."""
    style = resources.files("conformance.report.html").joinpath("templates/style.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert len(blocks) == 3
    colours = {
        name: value if len(value) == 7 else "#" + "".join(2 * digit for digit in value[1:])
        for name, value in re.findall(r"--([a-z0-9-]+): (#[0-9a-f]+)", blocks[scheme])
    }
    pairs = [
        *((text, "page") for text in ("text", "muted", "link", "bad", "good", "warn")),
        *((text, "panel") for text in ("text", "muted")),
        *((text, f"{tone}-panel") for tone in ("bad", "good", "warn") for text in (tone, "text", "muted")),
        *(("on-heat", f"h{shade}") for shade in range(5)),
        ("on-solid", "bad-solid"),
    ]
    for text, behind in pairs:
        light, dark = sorted((luminance(colours[text]), luminance(colours[behind])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{text} on {behind}"


def test_ten_thousand_failures_stay_a_page() -> None:
    """At most 5 MB, and in full only as many cases as a person may read."""
    failing = [
        record(f"gate/behaviour-{n % 40}/variant-{n}", "FAIL", first_failure=element(message="word " * 100))
        for n in range(10_000)
    ]
    text = page(*failing)
    assert len(text.encode()) < 5_000_000
    assert text.count('<details class="case">') < 200
    assert set(re.findall(r"gate/behaviour-\d+/variant-\d+", text)) == {one.id for one in failing}


def test_check_writes_the_page(run: Callable[..., object], tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text(
        "import conformance\nclass Port(conformance.Implementation):\n"
        "    def describe(self):\n        return conformance.Description('<b>port</b>', '1')\n"
        "    def rms_norm(self, x, weight, eps):\n        return x\n"
    )
    run("check", "port:Port", "--component", "norm", "--html", "page.html", "--json", "report.jsonl")
    document = parse((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "<b>port</b> 1" in document.text
    assert "Does not conform" in document.text
    assert document.all("h3")[0].text == "1norm"
    run("report", "report.jsonl", "--html", "again.html")
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "page.html").read_bytes()


def test_three_faults_are_three_places(run: Callable[..., object], tmp_path: Path) -> None:
    """What a person sees first: the three components, each with its mistake."""
    cases = "rotary/pairs or groups-ratio or window/rows or gate/bias or gate/vectors"
    run("check", "report_ports:ThreeFaults", "-k", cases, "--explain", "600", "--html", "page.html")
    document = parse((tmp_path / "page.html").read_text(encoding="utf-8"))
    cards = document.all("article")
    assert [card.all("h3")[0].text for card in cards] == ["1rotary", "2compressor", "3gate"]
    for card, flag in zip(cards, ("rope-pairing", "leftover-lost", "gate-route-scale"), strict=True):
        assert flag in card.text


def test_header_of_an_unknown_flag_and_component() -> None:
    document = parse(page(record("new-component/x/a", "FAIL", flags=("not-known-here",))))
    assert "not-known-here" in document.text
    assert isinstance(header(), Header)
