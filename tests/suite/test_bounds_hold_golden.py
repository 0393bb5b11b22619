"""Every recorded tap of the shipped model set lies within the bounds computed from the recorded inputs.

The cases check this for the taps that they judge against a recording; here it is checked for all of them, component by
component, so that a bound that is too narrow is seen even where no case compares it with a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest

from conformance.cases.attention import bounds
from conformance.cases.sparse_attention import listed_rows
from conformance.cases.traces import GoldenModel, Trace, exact
from conformance.fixtures import CALL_TAPS, LAYER_TAPS, STATE, Fixtures
from conformance.formats import BF16
from conformance.judge.bounded import Bounded
from conformance.judge.choices import CandidateBlocks, GateChoice, Selection
from conformance.judge.components import (
    attention,
    compressor,
    engram,
    experts,
    gate,
    hyper_connections,
    indexer,
    model,
    norm,
    sparse_attention,
)
from conformance.judge.components.teacher_forced import TeacherForcedAttention
from conformance.judge.expectations import Exact, Expectation, Within
from conformance.tensors import Tensor, concatenate

Item = tuple[str, Expectation, dict[str, Tensor]]
"""Where, the rule, and the recorded values that must satisfy it."""


@cache
def golden() -> GoldenModel:
    fixtures = Fixtures.open(verify=False)
    return GoldenModel(fixtures.model(next(name for name in fixtures.sets if fixtures.kind(name) == "model")))


@cache
def bounded(name: str) -> TeacherForcedAttention:
    trace = traces()[name]
    return bounds(golden(), trace, range(golden().config.n_layers), trace.scenario.reading)


def traces() -> dict[str, Trace]:
    """The scenarios that recorded every component's input."""
    return {trace.name: trace for trace in golden().traces if trace.has("attn_in", 0)}


def within(where: object, tap: str, expected: Bounded, recorded: Tensor) -> Item:
    return (str(where), Within(tap, expected, recorded.dtype, ()), {tap: recorded})


def tokens(tensor: Tensor) -> Tensor:
    """[B, T, ...] -> [B*T, ...]."""
    return tensor.reshape(tensor.shape[0] * tensor.shape[1], *tensor.shape[2:])


def of_streams(trace: Trace, layer: int) -> Iterator[Item]:
    """Coefficients, reads and writes of both sublayers."""
    config, weights = golden().config, golden().layer(layer)
    sublayers = (
        ("attn", trace.attention_stream(layer), trace.joined("pre_in", layer), "attn_out", "h_mid"),
        ("ffn", trace.joined("h_mid", layer), trace.joined("attn_pre", layer), "ffn_out", "h_out"),
    )
    for name, stream, pre, out, result in sublayers:
        h = exact(stream)
        found = hyper_connections.coefficients(config, h, *(weights[f"hc_{name}_{p}"] for p in ("fn", "scale", "base")))
        for part in ("pre", "post", "comb"):
            yield within(layer, f"{name}_{part}", getattr(found, part), trace.joined(f"{name}_{part}", layer))
        mixed = hyper_connections.read(h, exact(pre)).rounded(BF16)
        normed = norm.rms_norm(mixed, weights[f"{name}_norm.weight"], config.norm_eps)
        yield within(layer, f"{name}_in", normed, trace.joined(f"{name}_in", layer))
        post, comb = (exact(trace.joined(f"{name}_{part}", layer)) for part in ("post", "comb"))
        written = hyper_connections.write(exact(trace.joined(out, layer)), h, post, comb)
        yield within(layer, result, written, trace.joined(result, layer))
    assert trace.joined("pre_out", layer).equal_bits(trace.joined("ffn_pre", layer))
    if layer:
        assert trace.joined("pre_in", layer).equal_bits(trace.joined("pre_out", layer - 1))


def of_projections(trace: Trace, layer: int) -> Iterator[Item]:
    """What the attention makes of its input by itself, and its output from the recorded weighted sum."""
    config, rows = golden().config, bounded(trace.name).rows[layer]
    yield within(layer, "q_latent", rows.q_latent, trace.joined("q_latent", layer))
    yield within(layer, "window_rows", rows.window_rows, trace.joined("window_rows", layer))
    weights = golden().layer(layer).within("attn.")
    out = attention.output(config, layer, weights, exact(trace.joined("attn_o", layer)), trace.positions)
    yield within(layer, "attn_out", out, trace.joined("attn_out", layer))
    for call in range(len(trace.starts)):
        if not trace.scenario.has(call, "attn_q", layer):
            continue
        q, positions = trace.part(call, "attn_q", layer), trace.positions[:, list(trace.span(call))]
        latent = exact(trace.part(call, "q_latent", layer))
        yield within((layer, call), "attn_q", attention.queries(config, layer, weights, latent, positions), q)
        kv, listed = listed_rows(golden(), trace, layer, call)
        counts = sparse_attention.counts_of(listed, kv.shape[1])
        scale = config.head_dim**-0.5
        o = sparse_attention.attend(exact(q), exact(kv), counts, None, weights["attn_sink"], scale)
        yield within((layer, call), "attn_o", o, trace.part(call, "attn_o", layer))


def of_compression(trace: Trace, layer: int) -> Iterator[Item]:
    """A source's latents from its input, and what becomes of the recorded latents."""
    config, rows = golden().config, bounded(trace.name).rows[layer]
    if not config.compresses(layer) or not trace.total // config.ratio(layer):
        return
    weights, recorded = golden().layer(layer).within("attn."), trace.produced("latent", layer)
    yield within(layer, "latent", rows.latents, recorded)
    latent, positions = exact(recorded), rows.group_positions
    cached, keys = trace.produced("compressed_rows", layer), trace.produced("index_keys", layer)
    yield within(layer, "compressed_rows", compressor.compressed_rows(config, layer, latent, positions), cached)
    yield within(layer, "index_keys", indexer.index_keys(config, layer, weights, latent, positions), keys)
    # From the input alone, through an uncertain latent.
    yield within(layer, "compressed_rows", rows.compressed_rows, cached)
    yield within(layer, "index_keys", rows.index_keys, keys)


def of_indexing(trace: Trace, layer: int) -> Iterator[Item]:
    """Scores and selections of an indexing layer, from the inputs alone and from recorded scores."""
    config = golden().config
    if not config.ratio(layer) or not config.indexes(layer):
        return
    rows = bounded(trace.name).rows[layer]
    for call in range(len(trace.starts)):
        if not trace.scenario.has(call, "index_score", layer):
            continue
        span = slice(trace.span(call).start, trace.span(call).stop)
        positions = trace.positions[:, span]
        recorded = {tap: trace.scenario.tap(call, tap, layer) for tap in ("index_weights", "index_score", "selected")}
        yield within((layer, call), "index_weights", rows.index_weights[:, span], recorded["index_weights"])
        if trace.scenario.has(call, "index_q", layer):
            queries = trace.scenario.tap(call, "index_q", layer)
            yield within((layer, call), "index_q", rows.index_queries[:, span], queries)
        low, high, score = bounded(trace.name).restricted(layer, call)
        yield within((layer, call), "index_score", score, recorded["index_score"])
        visible = indexer.visibility(config, layer, positions, low.shape[-1])
        values = recorded["index_score"].values()
        for ends in ((low, high), (values, values)):
            yield str((layer, call)), Selection("selected", *ends, visible, config.index_topk, ()), recorded
        if layer == config.candidate_source_layer:
            candidates = trace.scenario.tap(call, "candidates", layer)
            seen = indexer.visible_counts(config, layer, positions)
            sizes = config.candidate_block_size, config.candidate_topk_blocks
            for scores in (exact(recorded["index_score"]), score.rounded(BF16)):
                rule = CandidateBlocks("candidates", scores, seen, *sizes, ())
                yield str((layer, call)), rule, {"candidates": candidates}


def of_chains(trace: Trace, layer: int) -> Iterator[Item]:
    """The attention's output from inputs alone, through every uncertain step between."""
    chain = bounded(trace.name)
    for call in range(len(trace.starts)):
        yield within((layer, call), "attn_out", chain.output(layer, call), trace.scenario.tap(call, "attn_out", layer))


def of_mixture(trace: Trace, layer: int) -> Iterator[Item]:
    """The gate's choice and weights, and the experts' sum with the recorded routing."""
    config, weights = golden().config, golden().layer(layer).within("ffn.")
    x = exact(tokens(trace.joined("ffn_in", layer)))
    mask = None if trace.image_mask is None else trace.image_mask.reshape(-1)
    plain, biased = gate.scores(weights.within("gate."), x, mask)
    routing = {tap: tokens(trace.joined(tap, layer)) for tap in ("gate_weights", "gate_indices")}
    yield str(layer), GateChoice(plain, biased, config.n_activated_experts, config.route_scale, ()), routing
    chosen = routing["gate_indices"].data.astype(np.int64)
    out = experts.combined(config, weights, x, exact(routing["gate_weights"]), chosen)
    yield within(layer, "ffn_out", out, tokens(trace.joined("ffn_out", layer)))


def of_engram(trace: Trace, layer: int) -> Iterator[Item]:
    """Hashes exactly, the write within its bounds."""
    config = golden().config
    if layer not in config.engram_layer_ids:
        return
    hashes = trace.joined("engram_hash", layer)
    ids, token_map = (tensor.data.astype(np.int64) for tensor in (trace.input_ids, golden().token_map))
    rows = engram.table_rows(config, layer, token_map, ids, trace.image_mask)
    yield str(layer), Exact("engram_hash", Tensor("I64", rows), ()), {"engram_hash": hashes}
    h, weights = exact(trace.joined("engram_in", layer)), golden().layer(layer).within("engram.")
    out = engram.write(config, weights, h, hashes.data, trace.image_mask)
    yield within(layer, "engram_out", out, trace.joined("engram_out", layer))


PARTS: dict[str, Callable[[Trace, int], Iterator[Item]]] = {
    "streams": of_streams,
    "projections": of_projections,
    "compression": of_compression,
    "indexing": of_indexing,
    "chains": of_chains,
    "mixture": of_mixture,
    "engram": of_engram,
}
SEEN: dict[str, set[str]] = {}
"""Taps checked by each parametrised test that ran."""


def check(items: Iterator[Item]) -> set[str]:
    """Judge every item; returns the taps seen."""
    seen = set()
    for where, rule, recorded in items:
        verdict = rule.judge(recorded)
        assert verdict.passed, f"layer or call {where}: {verdict}"
        assert verdict.count == 0 or verdict.bias is None or abs(verdict.bias) <= 5.0
        seen |= set(rule.taps)
    return seen


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", traces())
def test_recorded_layer_taps_lie_within_bounds(name: str, part: str) -> None:
    trace = traces()[name]
    for layer in range(golden().config.n_layers):
        SEEN.setdefault(part, set()).update(check(PARTS[part](trace, layer)))


@pytest.mark.parametrize("name", traces())
def test_the_ends_of_the_model_lie_within_bounds(name: str) -> None:
    trace, config = traces()[name], golden().config
    last = config.n_layers - 1
    h, pre = exact(trace.joined("h_out", last)), exact(trace.joined("pre_out", last))
    final, logits = model.head(config, golden().parameters, h, pre)
    ends = [start + length - 1 for start, length in zip(trace.starts, trace.lengths, strict=True)]
    recorded = [trace.scenario.tap(call, "logits") for call in range(len(ends))]
    stacked = concatenate([tensor.reshape(trace.batch, 1, -1) for tensor in recorded], axis=1)
    check(iter([within("end", "final_norm", final, trace.joined("final_norm"))]))
    check(iter([within("end", "logits", logits[:, ends], stacked)]))
    embedded = golden().parameters.tensor("embed.weight")[trace.input_ids.data]
    check(iter([("start", Exact("embed", embedded, ()), {"embed": trace.joined("embed")})]))


FOLLOWING = {
    "engram_in",  # the block's input
    "h_in",  # engram_out, or the layer before's h_out
    "pre_in",  # compared with the layer before's pre_out
    "pre_out",  # compared with ffn_pre
    "window_slots",  # a part of attn_list
    "attn_list",  # its order is free; what it lists is checked through attn_o
    "main_x",  # the draft's, which is not checked here
}


def test_every_layer_tap_is_checked_somewhere() -> None:
    if set(SEEN) != set(PARTS):
        pytest.skip("needs the whole file in one process")
    assert set().union(*SEEN.values()) == set(LAYER_TAPS) - FOLLOWING
    assert set(CALL_TAPS) >= {"final_norm", "logits", "embed"}
    assert set(STATE) == {"window", "compressed", "index_keys", "carry_kv", "carry_score"}
