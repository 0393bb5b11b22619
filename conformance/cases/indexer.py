"""The indexer: keys, queries, weights, scores and selections on recorded inputs (numerics.md 6.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from conformance.cases.case import Arguments, Call, Case, Place, Step
from conformance.cases.traces import GoldenModel, Joined, Trace, bf16, exact, int64
from conformance.judge import deviations
from conformance.judge.choices import Selection
from conformance.judge.components import indexer as rules_of
from conformance.judge.expectations import Within
from conformance.tensors import Tensor

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
KEY_AXES = ("request", "group", "feature")
SCORE_AXES = ("request", "position", "compressed position")


def cases(model: GoldenModel, scored: list[Trace], traces: list[Trace], joined: Joined) -> Iterator[Case]:
    """Each step of the indexer by itself, then selections sorted by what makes them difficult.

    `scored` are all traces that recorded scores, `traces` those that recorded what scores are made of.
    """
    if not model.config.index_source_layers:
        return
    parts: dict[str, tuple[str, tuple[str, ...], Callable[[], Iterator[Step]]]] = {
        "keys-from-unrotated-latent": (
            "Fails when keys are made from the turned latent, turned by another position, or quantised per 16.",
            ("index-key-norm", "index-rotation", "index-not-quantised", "fp4-formats-swapped"),
            partial(_keys, model, traces),
        ),
        "queries-rotated-then-quantised": (
            "Fails when a Hadamard transform or a norm of an earlier model is kept, or the FP4 rounding is left out.",
            ("hadamard-kept", "index-rotation", "index-not-quantised", "heads-transposed"),
            partial(_queries, model, joined),
        ),
        "head-weights-two-roundings": (
            "Fails when the head weights are scaled before they are rounded, or kept in fp32.",
            ("head-weights-rounded-once", "head-weights-scale"),
            partial(_weights, model, joined),
        ),
        "scores-relu-and-three-roundings": (
            "Fails when ReLU is missing or after the sum, a rounding point is fused away, or visibility is off by one.",
            ("relu-missing", "relu-after-sum", "dot-not-rounded", "weighted-not-rounded", "visible-too-early"),
            partial(_scores, model, traces),
        ),
    }
    for name, (why, flags, steps) in parts.items():
        yield Case(
            f"indexer/{name}/trace",
            "smoke" if name.startswith("scores") else "core",
            "composed",
            why,
            "numerics.md 6.3",
            steps,
            flags=flags,
            source=joined.source,
        )
    k = model.config.index_topk
    situations: dict[str, tuple[str, Callable[[Ints], Bools]]] = {
        "nothing-visible": ("Fails when a query without any compressed row gets one.", lambda seen: seen == 0),
        "fewer-visible-than-top-k": (
            "Fails when unused slots hold 0 or a position that is not visible instead of -1.",
            lambda seen: (seen > 0) & (seen < k),
        ),
        "exactly-top-k-visible": ("Fails when the last visible position is lost.", lambda seen: seen == k),
        "more-visible-than-top-k": (
            "Fails when the best positions are not those selected, or they are not sorted.",
            lambda seen: seen > k,
        ),
    }
    for name, (why, chosen) in situations.items():
        if any(True for _ in _selections(model, scored, chosen)):
            yield Case(
                f"indexer/select/{name}",
                "smoke" if name.startswith("more") else "core",
                "choice",
                why,
                "numerics.md 6.3",
                partial(_selections, model, scored, chosen),
                flags=("best-not-selected", "not-sorted")
                if name.startswith("more")
                else ("padding-not-minus-one", "invisible-selected"),
                source=f"{model.name}/all scenarios",
            )


def _attention(model: GoldenModel, layer: int) -> dict[str, object]:
    return {
        "config": model.mapping,
        "layer_id": layer,
        "weights": model.layer(layer).within("attn.").mapping(),
    }


def _keys(model: GoldenModel, traces: list[Trace]) -> Iterator[Step]:
    for layer in model.config.kv_source_layers:
        ratio = model.config.ratio(layer)
        for trace in traces:
            if trace.total < ratio:
                continue
            latent = trace.produced("latent", layer)
            positions = np.broadcast_to(np.arange(latent.shape[1]) * ratio, latent.shape[:2])

            def rules(
                layer: int = layer, trace: Trace = trace, latent: Tensor = latent, positions: Ints = positions
            ) -> list[Within]:
                weights = model.layer(layer).within("attn.")
                expected = rules_of.index_keys(model.config, layer, weights, exact(latent), positions)
                recorded = trace.produced("index_keys", layer)
                return [Within("index_keys", expected, "BF16", KEY_AXES, recorded=recorded)]

            arguments = {**_attention(model, layer), "latent": latent, "positions": int64(positions)}
            yield Step(Call("index_keys", arguments), rules, Place(layer, [trace.name]))


def _queries(model: GoldenModel, joined: Joined) -> Iterator[Step]:
    for layer in model.config.index_source_layers:
        q_latent = joined.tap("q_latent", layer)

        def rules(layer: int = layer, q_latent: Tensor = q_latent) -> list[Within]:
            weights = model.layer(layer).within("attn.")
            expected = rules_of.index_queries(model.config, layer, weights, exact(q_latent), joined.positions)
            return [Within("index_q", expected, "BF16", ("request", "position", "index head", "feature"))]

        arguments = {**_attention(model, layer), "q_latent": q_latent, "positions": int64(joined.positions)}
        yield Step(Call("index_queries", arguments), rules, joined.place(layer))


def _weights(model: GoldenModel, joined: Joined) -> Iterator[Step]:
    for layer in model.config.index_source_layers:
        x = joined.tap("attn_in", layer)

        def rules(layer: int = layer, x: Tensor = x) -> list[Within]:
            expected = rules_of.index_weights(model.config, model.layer(layer).within("attn."), exact(x))
            return [Within("index_weights", expected, "BF16", ("request", "position", "index head"))]

        yield Step(Call("index_weights", {**_attention(model, layer), "x": x}), rules, joined.place(layer))


def _scores(model: GoldenModel, traces: list[Trace]) -> Iterator[Step]:
    """Queries are recorded only here and there; elsewhere they are the nominal ones of the recorded latent."""
    config = model.config
    for layer in config.index_source_layers:
        weights = model.layer(layer).within("attn.")
        owner = config.kv_source(layer)
        for trace in traces:
            for call in range(len(trace.starts)):
                if not trace.scenario.has(call, "index_score", layer):
                    continue
                positions = trace.positions[:, list(trace.span(call))]
                count = (trace.span(call).stop) // config.ratio(layer)
                if trace.scenario.has(call, "index_q", layer):
                    queries = trace.scenario.tap(call, "index_q", layer)
                else:
                    latent = exact(trace.part(call, "q_latent", layer))
                    queries = bf16(rules_of.index_queries(config, layer, weights, latent, positions))
                arguments = {
                    "config": model.mapping,
                    "layer_id": layer,
                    "queries": queries,
                    "head_weights": trace.scenario.tap(call, "index_weights", layer),
                    "keys": trace.produced("index_keys", owner)[:, :count],
                    "positions": int64(positions),
                    "candidates": _candidates(model, trace, layer, call),
                }
                yield Step(
                    Call("index_scores", arguments),
                    partial(_score_rules, model, layer, arguments, positions),
                    trace.place(layer, call),
                )


def _candidates(model: GoldenModel, trace: Trace, layer: int, call: int) -> Tensor | None:
    if not model.config.masked_by_candidates(layer):
        return None
    return trace.scenario.tap(call, "candidates", model.config.candidate_source_layer)


def _score_rules(model: GoldenModel, layer: int, arguments: Arguments, positions: Ints) -> list[Within]:
    keys = exact(arguments["keys"])
    allowed = rules_of.visibility(model.config, layer, positions, keys.shape[1])
    if arguments["candidates"] is not None:
        allowed = allowed & arguments["candidates"].data
    expected = rules_of.index_scores(exact(arguments["queries"]), exact(arguments["head_weights"]), keys, allowed)
    return [Within("index_score", expected, deviations.score_format().name, SCORE_AXES)]


def _selections(model: GoldenModel, traces: list[Trace], chosen: Callable[[Ints], Bools]) -> Iterator[Step]:
    """The queries in one situation, picked out of the recorded scores of each call."""
    config = model.config
    for layer in config.index_source_layers:
        for trace in traces:
            for call in range(len(trace.starts)):
                if not trace.scenario.has(call, "index_score", layer):
                    continue
                positions = trace.positions[:, list(trace.span(call))]
                queries = np.flatnonzero(chosen(rules_of.visible_counts(config, layer, positions[0])))
                if not queries.size:
                    continue
                scores = trace.scenario.tap(call, "index_score", layer)[:, queries]
                arguments = {
                    "config": model.mapping,
                    "layer_id": layer,
                    "scores": scores,
                    "positions": int64(positions[:, queries]),
                }
                place = Place(layer, [f"{trace.name}/{call}"], positions[0, queries].tolist())
                recorded = trace.scenario.tap(call, "selected", layer)[:, queries]

                def rules(
                    layer: int = layer,
                    scores: Tensor = scores,
                    seen: Ints = positions[:, queries],
                    recorded: Tensor = recorded,
                ) -> list[Selection]:
                    visible = rules_of.visibility(config, layer, seen, scores.shape[-1])
                    axes = ("request", "position")
                    values = scores.values()
                    return [Selection("selected", values, values, visible, config.index_topk, axes, recorded)]

                yield Step(Call("select_positions", arguments), rules, place)
