"""What one call of the reference costs, in a process of its own: run by `conformance.bench.suite`.

    python -m conformance.bench.suite_probe attention 1024

prints one JSON line: a prefill of so many tokens, and the step of one token after it.  Weights are made by a call of
one token before those that are measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from conformance.adapters.session import Session
from conformance.adapters.target import open_target
from conformance.cases.case import Advance, Handle, Open
from conformance.cases.catalogue import catalogue
from conformance.cases.released_set import Released
from conformance.cases.traces import GoldenModel, int64
from conformance.config import ModelConfig
from conformance.fixtures import Fixtures
from conformance.tensors import Tensor

Clock = tuple[float, float]
Opened = Callable[[int, int], None]
"""Runs so many tokens from a position on."""
Unit = Callable[[Session], Callable[[], Opened]]
"""Opens what is measured anew, as often as it is called."""


def now() -> Clock:
    """Seconds of the clock on the wall, and of this process's processor."""
    return time.perf_counter(), time.process_time()


def source_layer(config: ModelConfig) -> int:
    """The layer that does most: it compresses every token, keeps its index keys and selects from them."""
    return next(layer for layer in config.kv_source_layers if config.ratio(layer) == 1)


def attention(session: Session) -> Callable[[], Opened]:
    """One attention layer at the released widths."""
    fixtures = Fixtures.open(verify=False)
    name = next(name for name in fixtures.sets if fixtures.kind(name) == "recipe")
    released = Released(fixtures.recipe(name))
    layer = source_layer(released.config)
    weights = released.weights.within(f"layers.{layer}.attn.")
    shared = {"config": released.mapping, "batch_size": 1}

    def run(length: int, start: int) -> None:
        x = released.input(f"bench/suite/{length}", (1, length, released.config.dim))
        session.ask(Advance("layer", {"x": x, "start_pos": int64([start])}))

    def opened() -> Opened:
        session.ask(Open("runtime", "runtime", {**shared, "reading": "intended"}))
        arguments = {**shared, "layer_id": layer, "weights": weights, "runtime": Handle("runtime")}
        session.ask(Open("layer", "attention", arguments))
        return run

    return opened


def model(session: Session) -> Callable[[], Opened]:
    """The whole model of the first model set."""
    fixtures = Fixtures.open(verify=False)
    name = next(name for name in fixtures.sets if fixtures.kind(name) == "model")
    golden = GoldenModel(fixtures.model(name))
    shared = {"config": golden.mapping, "batch_size": 1}
    weights = golden.parameters.mapping()

    def run(length: int, start: int) -> None:
        ids = Tensor("I32", (np.arange(start, start + length, dtype=np.int32) % golden.config.vocab_size)[None])
        inputs = {"input_ids": ids, "start_pos": int64([start]), "image_mask": None, "image_features": None}
        session.ask(Advance("model", inputs))

    def opened() -> Opened:
        session.ask(Open("runtime", "runtime", {**shared, "reading": "intended"}))
        arguments = {**shared, "weights": weights, "runtime": Handle("runtime"), "token_map": golden.token_map}
        session.ask(Open("model", "model", arguments))
        return run

    return opened


UNITS: Mapping[str, Unit] = {"attention": attention, "model": model}


def call_times(unit: str, length: int) -> Iterator[tuple[str, Clock, Clock]]:
    """The calls that are measured."""
    opened = UNITS[unit](open_target("reference"))
    opened()(1, 0)
    run = opened()
    start = now()
    run(length, 0)
    yield "prefill", start, now()
    start = now()
    run(1, length)
    yield "decode", start, now()


def fixture_times() -> Iterator[tuple[str, Clock, Clock]]:
    """Opening the shipped sets with and without their hashes, and making the catalogue."""
    start = now()
    Fixtures.open(verify=False)
    yield "open, headers only", start, now()
    start = now()
    fixtures = Fixtures.open()
    yield "open and verify", start, now()
    start = now()
    catalogue(fixtures)
    yield "make the catalogue", start, now()


def main(arguments: list[str]) -> None:
    """Measure what the arguments name: `fixtures`, or a unit and a length."""
    times = fixture_times() if arguments == ["fixtures"] else call_times(arguments[0], int(arguments[1]))
    found: dict[str, Any] = {
        what: {"seconds": end[0] - start[0], "processor": end[1] - start[1]} for what, start, end in times
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
