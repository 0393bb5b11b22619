"""A free-running pass of a live target: its whole model, or what it has instead, put together from parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from conformance.adapters.session import Answer, Session, UnsupportedRequest
from conformance.cases.case import Advance, Arguments, Handle, Open
from conformance.cases.model import opened_model, scenario_call
from conformance.cases.traces import GoldenModel, Trace
from conformance.tensors import Tensor
from conformance.tracing.run import Run
from conformance.tracing.taps import named


def free_running(golden: GoldenModel, trace: Trace, session: Session) -> Run:
    """Run a scenario freely through a target: nothing but ids (and image features) is given to it.

    The target's `model` is used where it shows something of its layers; one that returns only its logits is put
    together from its `block`s, each fed with the results of the one before, or from `stack`s of growing length.

    Raises:
        UnsupportedRequest: the target has neither model nor block nor stack.
    """
    ways: tuple[tuple[str, str, Callable[[GoldenModel, Trace, Session, Run], None]], ...] = (
        ("model", "model", _by_model),
        ("block", "blocks, each fed with the one before", _by_blocks),
        ("stack", "stacks of growing length", _by_stacks),
    )
    passes: list[Run] = []
    for method, how, way in ways:
        if not session.supports(method):
            continue
        run = Run(trace, how)
        session.reset()
        try:
            way(golden, trace, session, run)
        except UnsupportedRequest:
            continue
        except Answer as answer:
            run.ended = f"{answer.status}: {answer}"
        passes.append(run)
        if run.ended or any(layer is not None for _, layer, _ in run.taps):
            return run
    if not passes:
        raise UnsupportedRequest("the target has no model, block or stack that can run this scenario")
    return passes[0]


def _by_model(golden: GoldenModel, trace: Trace, session: Session, run: Run) -> None:
    for step in opened_model(golden, trace, "model"):
        session.ask(step.request)
    for call in range(len(trace.starts)):
        run.add(call, session.ask(scenario_call(trace, call, "model")))


def _by_blocks(golden: GoldenModel, trace: Trace, session: Session, run: Run) -> None:
    config = golden.config
    session.ask(_runtime(golden, trace, "runtime"))
    for layer in range(config.n_layers):
        arguments = {
            "config": golden.mapping,
            "batch_size": trace.batch,
            "layer_id": layer,
            "weights": golden.layer(layer).mapping(),
            "runtime": Handle("runtime"),
            "token_map": golden.token_map if layer in config.engram_layer_ids else None,
        }
        session.ask(Open(f"layer {layer}", "block", arguments))
    for call in range(len(trace.starts)):
        h, pre = _entry(golden, trace, call)
        for layer in range(config.n_layers):
            results = session.ask(Advance(f"layer {layer}", _inputs(trace, call, h, pre)))
            run.add(call, {named(layer, tap): tensor for tap, tensor in results.items()})
            h, pre = _handed_on(run, call, layer)


def _by_stacks(golden: GoldenModel, trace: Trace, session: Session, run: Run) -> None:
    for name, layers in _prefixes(golden):
        session.ask(_runtime(golden, trace, f"runtime of {name}"))
        arguments = {
            "config": golden.mapping,
            "batch_size": trace.batch,
            "layer_ids": layers,
            "weights": golden.parameters.mapping(),
            "runtime": Handle(f"runtime of {name}"),
            "token_map": golden.token_map,
        }
        session.ask(Open(name, "stack", arguments))
    for call in range(len(trace.starts)):
        h, pre = _entry(golden, trace, call)
        for name, layers in _prefixes(golden):
            results = session.ask(Advance(name, _inputs(trace, call, h, pre)))
            run.add(call, {named(layers[-1], tap): results[tap] for tap in ("h_out", "pre_out") if tap in results})


def _prefixes(golden: GoldenModel) -> Iterator[tuple[str, list[int]]]:
    for end in range(1, golden.config.n_layers + 1):
        yield f"layers 0 to {end - 1}", list(range(end))


def _runtime(golden: GoldenModel, trace: Trace, name: str) -> Open:
    arguments = {"config": golden.mapping, "batch_size": trace.batch, "reading": trace.scenario.reading}
    return Open(name, "runtime", arguments)


def _entry(golden: GoldenModel, trace: Trace, call: int) -> tuple[Tensor, Tensor]:
    """What the first layer is given: the embedding in every stream, and the mix that reads the first one alone."""
    streams = golden.config.hc_mult
    if trace.image_mask is not None and trace.scenario.has(call, "h_in", 0):
        h = trace.scenario.tap(call, "h_in", 0)
    else:
        embedded = golden.parameters.tensor("embed.weight")[trace.part(call, "input_ids").data]
        h = Tensor(embedded.dtype, np.repeat(embedded.data[:, :, None], streams, axis=2))
    mix = np.zeros((*h.shape[:2], streams), np.float32)
    mix[..., 0] = 1.0
    return h, Tensor("F32", mix)


def _inputs(trace: Trace, call: int, h: Tensor, pre: Tensor) -> Arguments:
    return {
        "h": h,
        "pre": pre,
        "input_ids": trace.part(call, "input_ids"),
        "start_pos": trace.start_pos(call),
        "image_mask": trace.mask_part(call),
    }


def _handed_on(run: Run, call: int, layer: int) -> tuple[Tensor, Tensor]:
    h, pre = run.get(call, "h_out", layer), run.get(call, "pre_out", layer)
    if h is None or pre is None:
        wrong = next((m for m in run.malformed if m.tap in ("h_out", "pre_out")), None)
        found = "is missing" if wrong is None else f"cannot be handed on: {wrong.tap}: {wrong.message}"
        raise BadResultOfBlock(f"the result of layer {layer} in call {call} {found}")
    return h, pre


class BadResultOfBlock(Answer):
    """A block returned nothing that the next one can be given."""

    status = "FAIL"
