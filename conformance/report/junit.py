"""JUnit XML, for the test views of CI systems: built from the records, one `testcase` a case.

FAIL and XPASS are failures; CRASH, TIMEOUT, PROTOCOL and BROKEN are errors; XFAIL, QUARANTINE and UNSUPPORTED are
skipped, with the reason.  The body of a failure is what the terminal prints for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from conformance.report.records import CaseRecord, Footer, Header
from conformance.report.terminal import failure_text

ELEMENTS: Mapping[str, str] = {
    "FAIL": "failure",
    "XPASS": "failure",
    "CRASH": "error",
    "TIMEOUT": "error",
    "PROTOCOL": "error",
    "BROKEN": "error",
    "XFAIL": "skipped",
    "QUARANTINE": "skipped",
    "UNSUPPORTED": "skipped",
}
"""The element that a status becomes; a pass has none."""

NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not have, not even escaped."""


def junit_xml(header: Header, records: Sequence[CaseRecord], footer: Footer) -> str:
    """The report as the text of an XML file: one test suite a component."""
    root = ElementTree.Element("testsuites", {"name": f"conformance of {_clean(header.target)}", **_totals(records)})
    groups: dict[str, list[CaseRecord]] = {}
    for record in records:
        groups.setdefault(record.component, []).append(record)
    for component, group in groups.items():
        attributes = {"name": _clean(component), **_totals(group), "timestamp": header.started}
        attributes["skipped"] = str(sum(ELEMENTS.get(record.status) == "skipped" for record in group))
        suite = ElementTree.SubElement(root, "testsuite", attributes)
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in _properties(header, footer).items():
            ElementTree.SubElement(properties, "property", {"name": name, "value": _clean(value)})
        for record in group:
            _add_case(suite, record)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _add_case(suite: ElementTree.Element, record: CaseRecord) -> None:
    attributes = {
        "classname": _clean(f"conformance.{record.component}"),
        "name": _clean(record.id),
        "time": f"{record.seconds:.3f}",
    }
    case = ElementTree.SubElement(suite, "testcase", attributes)
    tag = ELEMENTS.get(record.status)
    if tag is None:
        return
    element = ElementTree.SubElement(case, tag, {"type": record.status, "message": _clean(summary_of(record))})
    if tag != "skipped":
        element.text = _clean(failure_text(record))


def summary_of(record: CaseRecord) -> str:
    """What became of a case, in one line."""
    known = record.expectation
    if known is not None and record.status in ("XFAIL", "QUARANTINE"):
        return f"{known.status}: {known.reason} ({known.url})"
    element = record.first_failure
    found = record.message or (f"{element.tap}: {element.message} at {element.where}" if element else "")
    if element is not None and not record.message and element.bound:
        found += f", error/bound {element.ratio:.3g}"
    return f"{record.status}: {' '.join(found.split())}"


def _totals(records: Sequence[CaseRecord]) -> dict[str, str]:
    tags = [ELEMENTS.get(record.status) for record in records]
    return {
        "tests": str(len(records)),
        "failures": str(tags.count("failure")),
        "errors": str(tags.count("error")),
        "time": f"{sum(record.seconds for record in records):.3f}",
    }


def _properties(header: Header, footer: Footer) -> dict[str, str]:
    implementation = header.implementation
    properties = {
        "suite": header.suite,
        "target": header.target,
        "implementation": f"{implementation['name']} {implementation['version']}",
        **({"device": implementation["device"]} if implementation["device"] else {}),
        "reading": header.reading,
        "accumulator": implementation["accumulator"],
        "lock": header.fixtures["lock"],
        "level": header.selection["level"],
        "exit_code": str(footer.exit_code),
    }
    return properties | ({"stopped": footer.stopped} if footer.stopped else {})


def _clean(text: str) -> str:
    return NOT_IN_XML.sub(lambda match: match[0].encode("unicode_escape", "backslashreplace").decode(), text)
