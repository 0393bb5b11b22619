"""`flags.toml` and the cases name the same mistakes."""

from __future__ import annotations

import pytest

from conformance.cases.catalogue import catalogue
from conformance.cases.flags import BUG_TYPES, load_flags, parse_flags
from conformance.errors import ConformanceError
from conformance.fixtures import Fixtures

GOOD = '[a]\nbug_type = "MASK"\neffect = "e"\ndescription = "d"\nlinks = ["l"]\n'


@pytest.fixture(scope="module")
def used() -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for case in catalogue(Fixtures.open(verify=False)):
        for flag in case.flags:
            result.setdefault(flag, []).append(case.id)
    return result


def test_every_flag_of_a_case_is_defined(used: dict[str, list[str]]) -> None:
    undefined = {flag: ids[0] for flag, ids in used.items() if flag not in load_flags()}
    assert not undefined


def test_every_flag_is_used_by_a_case(used: dict[str, list[str]]) -> None:
    assert not sorted(set(load_flags()) - set(used))


def test_no_case_names_a_flag_twice() -> None:
    twice = [case.id for case in catalogue(Fixtures.open(verify=False)) if len(set(case.flags)) != len(case.flags)]
    assert not twice


def test_effects_are_one_sentence() -> None:
    assert not [flag.name for flag in load_flags().values() if flag.effect.count(". ") or not flag.effect.endswith(".")]


def test_a_flag_is_read() -> None:
    flag = parse_flags(GOOD)["a"]
    assert (flag.bug_type, flag.effect, flag.description, flag.links) == ("MASK", "e", "d", ("l",))
    assert flag.bug_type in BUG_TYPES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("MASK", "OTHER"), "bug_type 'OTHER'"),
        (GOOD.replace('effect = "e"\n', ""), "effect"),
        (GOOD + "severity = 3\n", "severity"),
        (GOOD.replace('["l"]', "[]"), "links"),
        (GOOD.replace('["l"]', '"l"'), "links"),
        (GOOD.replace('"d"', '" "'), "description"),
        ("a = 1\n", "not a table"),
        ("[a", "flags.toml"),
    ],
)
def test_a_malformed_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConformanceError, match=r"flags\.toml") as error:
        parse_flags(text)
    assert message in str(error.value)
