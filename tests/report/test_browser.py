"""The pages in a real browser: nothing logged, nothing wider than the screen, names for what assistants read out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import chromium
import made_reports
import pytest
from made_reports import header, record, stored

from conformance.report.compare import compare
from conformance.report.html.compare_page import compare_page, matrix_page
from conformance.report.html.run_page import run_page
from conformance.report.matrix import make_matrix

EXECUTABLE = chromium.find()
pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium on this machine")

LONG = "x" * 199
RECORDS = [
    record("rotary/pairs/a", "FAIL"),
    record(f"rotary/{LONG}/{LONG}", "FAIL", tap=LONG, rerun=LONG * 5),
    record("block/plain/a", "FAIL", tap="h_out"),
    *(record(f"norm/rms/{number}") for number in range(40)),
    record("moe/x/a", "UNSUPPORTED", message=LONG * 3),
]
NAMED = {"image", "region", "table", "link", "heading", "article", "navigation", "DisclosureTriangle", "columnheader"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    assert EXECUTABLE is not None
    with chromium.Browser(EXECUTABLE, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def pages(tmp_path: Path) -> dict[str, Path]:
    before = stored(tmp_path / "a.jsonl", record("rotary/pairs/a"), record("norm/rms/0", "FAIL"))
    after = stored(tmp_path / "b.jsonl", *RECORDS, implementation={"name": LONG}, reading="literal")
    texts = {
        "run": run_page(header(len(RECORDS)), RECORDS, made_reports.footer(RECORDS)),
        "compare": compare_page(compare(before, after)),
        "matrix": matrix_page(make_matrix([before, after, after])),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: tmp_path / f"{name}.html" for name in texts}


@pytest.mark.parametrize("name", ["run", "compare", "matrix"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page(browser: chromium.Browser, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    browser.open(pages[name], width, dark=dark)
    assert browser.log == []
    # With everything open: what is folded must fit as well.
    browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    nameless = {role for role, text in browser.accessible() if role in NAMED and not text.strip()}
    assert not nameless
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (not dark)


def test_a_keyboard_reaches_links_tables_and_what_is_folded(browser: chromium.Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"], 1280)
    reached = []
    for _ in range(14):
        for kind in ("rawKeyDown", "keyUp"):
            browser.send("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.append(browser.evaluate("document.activeElement.className || document.activeElement.localName"))
        seen = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert seen != "none"
    assert reached[0] == "skip"
    assert {"a", "wide"} <= set(reached)


def test_ten_thousand_cases_open(browser: chromium.Browser, tmp_path: Path) -> None:
    many = [record(f"gate/behaviour-{n % 40}/variant-{n}", "FAIL" if n % 3 else "PASS") for n in range(10_000)]
    path = tmp_path / "many.html"
    path.write_text(run_page(header(len(many)), many, made_reports.footer(many)), encoding="utf-8")
    browser.open(path, 390)
    assert browser.log == []
    assert browser.evaluate("document.querySelectorAll('#cases ~ details tbody tr').length") == len(many)
