"""The reference through the protocol: what passes in this process passes from another one, stateful or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import referencing
from jsonschema import Draft202012Validator
from transport_sessions import OpenSession, command

from conformance.adapters.process import ProcessSession, open_process
from conformance.cases import catalogue
from conformance.cases.case import Case
from conformance.fixtures import Fixtures
from conformance.protocol import messages, store
from conformance.protocol.store import TemporaryStore
from conformance.protocol.values import RESET, encode_request
from conformance.runner import run_case

SELECTED = (
    "quantize/fp8-codes-and-scales/trace",
    "quantize/fp4-e8m0-nibbles/all-codes",
    "linear/lattice-fp8/three-tokens",
    "linear/lattice-fp4/three-tokens",
    "norm/rms/block-inputs",
    "rotary/frequencies/compressed",
    "hyper_connections/coefficients/attention",
    "window/prefill-list/equal-to-window",
    "compressor/carry-ratio-2/prefill-2-tokens",
    "indexer/select/no-compressed-position",
    "indexer/scores-relu-and-three-roundings/trace",
    "sparse_attention/sink-and-listed-rows/prefill-several-windows",
    "attention/candidate-source-ratio-1/prefill-one-more-than-window",
    "attention/reusing-ratio-1/prefill-one-more-than-window",
)
STATEFUL = ("block/", "stack/", "model/", "engram/", "gate/", "experts/", "dspark/")
"""Components of which the quickest cases are taken."""


@cache
def cases() -> Mapping[str, Case]:
    return {case.id: case for case in catalogue.catalogue(Fixtures.open(verify=False))}


def chosen() -> list[str]:
    smoke = [case.id for case in cases().values() if case.level == "smoke"]
    return [*SELECTED, *(name for prefix in STATEFUL for name in [i for i in smoke if i.startswith(prefix)][:2])]


@pytest.fixture(scope="module")
def harness() -> Iterator[ProcessSession]:
    """One process for all of them: a case must not leave anything to the next."""
    session = open_process(command("healthy.py"))
    yield session
    session.close()


@pytest.mark.parametrize("name", chosen())
def test_the_reference_passes(name: str, harness: ProcessSession) -> None:
    result = run_case(cases()[name], harness)
    assert result.status == "PASS", result.message


def test_weights_of_the_recipe_come_by_name_to_who_makes_them(session: OpenSession, nothing_left: Path) -> None:
    harness = session("healthy.py", "--recipe")
    assert run_case(cases()["experts/routed-expert/released-width"], harness).status == "PASS"
    assert not list(nothing_left.rglob("weights*"))


def test_weights_are_written_once_for_all_cases(session: OpenSession, nothing_left: Path) -> None:
    harness = session("healthy.py")
    names = ["attention/output-turned-back-and-grouped/trace", "window/rows-quantised-after-rotation/trace"]
    for name in names:
        assert run_case(cases()[name], harness).status == "PASS"
    written = {path: path.stat() for path in nothing_left.rglob("weights*")}
    assert written
    for name in names:
        assert run_case(cases()[name], harness).status == "PASS"
    assert {path: path.stat() for path in nothing_left.rglob("weights*")} == written


def test_weights_that_are_too_many_go_and_come_back_under_another_name(
    session: OpenSession, nothing_left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "KEPT_WEIGHTS", 0)
    harness, case = session("healthy.py"), cases()["window/rows-quantised-after-rotation/trace"]
    names = []
    for _ in range(2):
        harness.reset()
        for step in case.steps():
            harness.ask(step.request)
        names.append({path.name for path in nothing_left.rglob("weights*")})
        harness.finish()
        assert not list(nothing_left.rglob("weights*"))
    assert names[0]
    assert not names[0] & names[1]


def _validator(name: str) -> Draft202012Validator:
    resources = [referencing.Resource.from_contents(messages.schema(part)) for part in ("request", "command", "reply")]
    registry: Any = referencing.Registry().with_resources([(r.id() or "", r) for r in resources])
    return Draft202012Validator(messages.schema(name), registry=registry)


def test_what_is_sent_is_what_the_schemas_say(tmp_path: Path) -> None:
    commands, written = _validator("command"), TemporaryStore(tmp_path, recipe=True)
    sent = [messages.start(tmp_path), messages.DESCRIBE, messages.STOP, messages.run(RESET, tmp_path / "none")]
    for name in (*chosen(), "experts/routed-expert/released-width"):
        requests = [encode_request(step.request, written) for step in cases()[name].steps()]
        sent += [messages.run(request, tmp_path / "results") for request in requests]
    kinds = set()
    for message in sent:
        line = json.loads(messages.encode(message, 7))
        kinds.add(line.get("request", line)["kind" if "request" in line else "command"])
        commands.validate(line)
    assert kinds == {"start", "describe", "stop", "reset", "call", "open", "step", "state"}


@pytest.mark.parametrize("broken", [{"seq": -1}, {"command": "walk"}, {"request": {"kind": "call"}}, {"results": None}])
def test_the_schema_of_commands_can_refuse(broken: Mapping[str, Any], tmp_path: Path) -> None:
    message = json.loads(messages.encode(messages.run(RESET, tmp_path), 1)) | broken
    assert not _validator("command").is_valid(message)
