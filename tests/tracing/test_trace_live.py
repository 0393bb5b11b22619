"""Traces of ports that run: mistakes planted in one layer are named, honest variants do not diverge."""

from __future__ import annotations

from functools import cache

import pytest
from layer_faults import PLANTED

from conformance.errors import ConformanceError, TargetError
from conformance.faults.honest import HONEST_VARIANTS, NOISE_NAMES
from conformance.tracing import trace as tracing
from conformance.tracing.trace import Traced, TraceOptions, trace

PROMPT, DECODE = "prefill-17", "decode-from-33"


@cache
def traced(target: str, scenario: str = PROMPT) -> Traced:
    return trace(TraceOptions(target, (scenario,)), lambda _: None)


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_in_one_layer_is_named(name: str) -> None:
    planted = PLANTED[name]
    found = traced(f"layer_faults:{name}", PROMPT if planted.only_at is None else DECODE)
    (finding,) = found.findings
    assert found.exit_code == 1
    assert finding.wrong is not None
    assert (finding.wrong.layer, finding.wrong.component) == (planted.layer, planted.component)
    if planted.only_at is not None:
        assert finding.run.trace.starts[finding.wrong.call] == planted.only_at
    if finding.divergence is not None and finding.divergence.layer is not None:
        assert finding.divergence.layer >= planted.layer
    assert f"layer {planted.layer}'s {planted.component}" in finding.sentences()[-1].lower().replace("engram", "Engram")


@pytest.mark.parametrize("name", ["OutputNotTurnedBack", "RoutingIgnored", "EngramGateSign"])
def test_teacher_forced_cases_agree_on_recorded_inputs(name: str) -> None:
    planted, (finding,) = PLANTED[name], traced(f"layer_faults:{name}").findings
    wrong = {(forced.layer, forced.component) for forced in finding.forced if forced.passed is False}
    assert (planted.layer, planted.component) in wrong
    assert {layer for layer, _ in wrong} == {planted.layer}
    assert any(forced.passed and forced.layer == planted.layer - 1 for forced in finding.forced)


def test_a_port_that_shows_no_tap_is_asked_component_by_component() -> None:
    (finding,) = traced("layer_faults:LogitsOnly").findings
    assert finding.run.how.startswith("blocks")
    assert finding.failed is not None
    assert (finding.failed.layer, finding.failed.component) == (7, "mixture")
    assert "layer 7's mixture" in finding.sentences()[-1]


@pytest.mark.parametrize("name", [*NOISE_NAMES, "streams-written-fused", "norm-by-division", "experts-in-reverse"])
def test_honest_variants_do_not_diverge(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = next(variant for variant in HONEST_VARIANTS if variant.name == name)
    with variant.session() as session:
        monkeypatch.setattr(tracing, "open_target", lambda *_: session)
        found = trace(TraceOptions("honest", (PROMPT,)), lambda _: None)
    assert found.exit_code == 0, found.findings[0].sentences()
    assert len(found.findings[0].introduced) > 300


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (TraceOptions("reference", ("prefill-99",)), "--scenario prefill-99"),
        (TraceOptions("reference", set_name="released"), "--set released"),
        (TraceOptions("no_such_module:Port"), "no_such_module"),
        (TraceOptions("dir:/nowhere/at/all"), "not a directory"),
    ],
)
def test_what_cannot_be_traced_is_one_line(options: TraceOptions, said: str) -> None:
    with pytest.raises(ConformanceError, match=said) as error:
        trace(options, lambda _: None)
    assert "\n" not in str(error.value)


def test_a_target_without_model_block_or_stack_cannot_be_traced() -> None:
    with pytest.raises(TargetError, match="no model, block or stack"):
        traced("layer_faults:NormOnly")
