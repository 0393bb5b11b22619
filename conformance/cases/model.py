"""The ends of the model, its parameter counts, and scenarios from ids to logits and state (numerics.md 0 and 9)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import resources
from typing import Any

import numpy as np

from conformance.cases.behaviours import named
from conformance.cases.case import Advance, Call, Case, Handle, Open, Place, ReadState, Step
from conformance.cases.traces import GoldenModel, Joined, Trace, exact
from conformance.judge.components.model import head
from conformance.judge.expectations import Exact, Expectation, OwnArgmax, Within
from conformance.judge.noise import Floors
from conformance.judge.propagated import Propagated
from conformance.tensors import Tensor

RELEASED_COUNTS: Mapping[str, int] = {
    "stream": 491_547,
    "norm": 5_120,
    "attention/24": 132_024_128,
    "moe/24": 13_626_901_248,
    "layer/24": 13_759_918_710,
    # Three reusing layers hold 41,263,535,970.
    "layer/25": 13_754_511_990,
}
"""The table of numerics.md 0."""


FREE_RUNNING_FLAGS = (
    "embedding-scaled",
    "layer-order",
    "image-not-placed",
    "gate-image-bias",
    "logits-position",
    "first-mix-not-one-hot",
)


def released_configuration() -> Mapping[str, Any]:
    """The released hyper-parameters under their published names."""
    text = resources.files("conformance").joinpath("configs/released.json").read_text(encoding="utf-8")
    configuration: Mapping[str, Any] = json.loads(text)
    return configuration


def cases(model: GoldenModel, traces: list[Trace], joined: Joined, floors: Floors) -> Iterator[Case]:
    """Exact ends first, then free-running scenarios; a literal trace is for targets that follow that reading."""
    yield Case(
        "model/parameter-counts/released",
        "smoke",
        "exact",
        "Fails when a layer has weights that its role does not have, or lacks one of the two gate biases.",
        "numerics.md 0",
        _counts,
        flags=("parameter-count",),
        source="released configuration",
    )
    yield Case(
        "model/embed/trace",
        "core",
        "exact",
        "Fails when embedding rows are scaled or rounded.",
        "numerics.md 9",
        partial(_embed, model, joined),
        flags=("embedding-scaled", "embedding-row-off"),
        source=joined.source,
    )
    yield Case(
        "model/head-reads-with-last-mix/trace",
        "smoke",
        "composed",
        "Fails when the streams are averaged at the end, or logits are rounded to bf16.",
        "numerics.md 9",
        partial(_head, model, joined),
        flags=("streams-averaged", "logits-in-bf16", "final-norm-missing"),
        source=joined.source,
    )
    for name, trace in named(traces).items():
        literal = trace.scenario.reading == "literal"
        case_id = f"model/free-running{'-literal' if literal else ''}/{name}"
        yield Case(
            case_id,
            "core",
            "propagated",
            "Fails when anything at all is wrong by more than the model's own noise; the other cases say what.",
            "numerics.md 9",
            partial(_free_running, model, trace, floors, case_id),
            flags=FREE_RUNNING_FLAGS,
            source=trace.source,
            reading=trace.scenario.reading if len(trace.starts) > 1 else None,
        )
    yield from _image_then_text(model, traces, floors)


def _image_then_text(model: GoldenModel, traces: list[Trace], floors: Floors) -> Iterator[Case]:
    """The text is judged as when it runs alone, by the same noise floors."""
    images = [trace for trace in traces if trace.image_mask is not None and _image_features(trace, 0) is not None]
    texts = {
        name: trace
        for name, trace in named(traces).items()
        if trace.image_mask is None and trace.scenario.reading == "intended"
    }
    longest = max((len(trace.starts) for trace in texts.values()), default=0)
    for name, trace in texts.items() if images else ():
        yield Case(
            f"model/text-after-image/{name}",
            "core" if len(trace.starts) == longest else "full",
            "propagated",
            "Fails when image tokens of one request are remembered in another: masks, features, or what they stopped.",
            "numerics.md 11",
            partial(_after_image, model, images[0], trace, floors, f"model/free-running/{name}"),
            flags=("image-remembered",),
            source=f"{images[0].source}+{trace.name}",
            reading=trace.scenario.reading if len(trace.starts) > 1 else None,
        )


def _counts() -> Iterator[Step]:
    rules = [Exact(name, Tensor("I64", np.asarray(count, np.int64)), ()) for name, count in RELEASED_COUNTS.items()]
    yield Step(Call("parameter_counts", {"config": released_configuration()}), lambda: rules)


def _embed(model: GoldenModel, joined: Joined) -> Iterator[Step]:
    arguments = {"weight": model.parameters.tensor("embed.weight"), "input_ids": joined.tap("input_ids")}
    expected = Exact("embed", joined.tap("embed"), ("request", "position", "feature"))
    yield Step(Call("embed", arguments), lambda: [expected], joined.place())


def _head(model: GoldenModel, joined: Joined) -> Iterator[Step]:
    last = model.config.n_layers - 1
    h, pre = joined.tap("h_out", last), joined.tap("pre_out", last)
    arguments = {"config": model.mapping, "weights": model.parameters.mapping(), "h": h, "pre": pre}

    def rules() -> list[Within]:
        final_norm, logits = head(model.config, model.parameters, exact(h), exact(pre))
        recorded = joined.tap("final_norm")
        return [
            Within("final_norm", final_norm, "BF16", ("request", "position", "feature"), recorded=recorded),
            Within("logits", logits, "F32", ("request", "position", "token id")),
        ]

    yield Step(Call("head", arguments), rules, joined.place(last))


def _free_running(model: GoldenModel, trace: Trace, floors: Floors, case_id: str) -> Iterator[Step]:
    yield from opened_model(model, trace, "model")
    for call in range(len(trace.starts)):
        rules = partial(_call_rules, trace, call, floors, case_id)
        yield Step(scenario_call(trace, call, "model"), rules, Place(None, [call]))
    state = partial(_state_rules, model, trace, floors, case_id)
    yield Step(ReadState("model"), state, Place(None, [f"state after {len(trace.starts) - 1}"]))


def opened_model(model: GoldenModel, trace: Trace, name: str) -> Iterator[Step]:
    """A model with a runtime of its own."""
    shared = {"config": model.mapping, "batch_size": trace.batch}
    yield Step(Open(f"runtime of {name}", "runtime", {**shared, "reading": trace.scenario.reading}))
    arguments = {
        **shared,
        "weights": model.parameters.mapping(),
        "runtime": Handle(f"runtime of {name}"),
        "token_map": model.token_map,
    }
    yield Step(Open(name, "model", arguments))


def scenario_call(trace: Trace, call: int, name: str) -> Advance:
    """One call of a scenario, put to the model `name`."""
    return Advance(
        name,
        {
            "input_ids": trace.part(call, "input_ids"),
            "start_pos": trace.start_pos(call),
            "image_mask": trace.mask_part(call),
            "image_features": _image_features(trace, call),
        },
    )


def _after_image(model: GoldenModel, image: Trace, text: Trace, floors: Floors, floors_of: str) -> Iterator[Step]:
    """A request with an image and one without, call by call in turn: the second must not notice the first."""
    yield from opened_model(model, image, "with an image")
    for call in range(max(len(image.starts), len(text.starts))):
        if call < len(image.starts):
            yield Step(scenario_call(image, call, "with an image"))
        if not call:
            yield from opened_model(model, text, "text alone")
        if call < len(text.starts):
            rules = partial(_call_rules, text, call, floors, floors_of)
            yield Step(scenario_call(text, call, "text alone"), rules, Place(None, [call]))
    state = partial(_state_rules, model, text, floors, floors_of)
    yield Step(ReadState("text alone"), state, Place(None, [f"state after {len(text.starts) - 1}"]))


def _image_features(trace: Trace, call: int) -> Tensor | None:
    """The placed features, as the first block received them."""
    if trace.image_mask is None or not trace.scenario.has(call, "h_in", 0):
        return None
    return Tensor("BF16", np.ascontiguousarray(trace.scenario.tap(call, "h_in", 0).data[:, :, 0]))


def _call_rules(trace: Trace, call: int, floors: Floors, case_id: str) -> Sequence[Expectation]:
    logits = trace.scenario.tap(call, "logits")
    allowance = floors.allowance(case_id, "logits")
    return [
        Propagated("logits", logits, allowance, floors.describe(), ("request", "token id")),
        OwnArgmax("output_ids", "logits"),
    ]


def _state_rules(model: GoldenModel, trace: Trace, floors: Floors, case_id: str) -> Sequence[Expectation]:
    rules = []
    for layer in range(model.config.n_layers):
        for name in ("window", "compressed", "index_keys"):
            recorded = trace.state(layer, name)
            if recorded is not None:
                tap = f"layer{layer}/{name}"
                allowance = floors.allowance(case_id, tap)
                rules.append(Propagated(tap, recorded, allowance, floors.describe(), ("request", "row", "feature")))
    return rules
