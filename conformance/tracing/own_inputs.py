"""What each component made of the inputs that it was really given: the introduced error, bounded, layer by layer.

In a free-running pass everything behind an early difference differs, and where a choice among near ties fell the other
way it differs by as much as a mistake would.  But every component can be held against the equations on the target's own
inputs, by the bounds of the component cases: what is wrong there was made there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from conformance.cases.attention import needed_layers, output_rules, tap_rules
from conformance.cases.moe import mixture
from conformance.cases.traces import GoldenModel, exact
from conformance.formats import BF16
from conformance.judge.choices import CandidateBlocks, GateChoice
from conformance.judge.components import engram, gate, hyper_connections, indexer
from conformance.judge.components.experts import combined
from conformance.judge.components.model import head
from conformance.judge.components.norm import rms_norm
from conformance.judge.components.teacher_forced import Call, TeacherForcedAttention
from conformance.judge.expectations import Exact, Expectation, Mode, Verdict, Within
from conformance.tensors import Tensor, concatenate
from conformance.tracing.run import Run
from conformance.tracing.taps import LAYER_TAPS

ROWS = ("request", "position", "feature")
STREAMS = ("request", "position", "stream", "feature")
PER_STREAM = ("request", "position", "stream")
COMB = ("request", "position", "summed stream", "written stream")
SUBLAYERS = {"attn": "attn_in", "ffn": "ffn_in"}

Source = Callable[[int], Tensor | None]
"""A tap of a call, None where it was not shown."""
Inputs = Mapping[str, Tensor]
Rules = Callable[[Inputs], Sequence[Expectation]]


@dataclass(frozen=True)
class Introduced:
    """The verdict on one tap of one layer, on the target's own inputs."""

    layer: int | None
    component: str
    tap: str
    verdict: Verdict
    call: int
    """Of the first wrong element; the last judged call where there is none."""
    position: int | None


@dataclass
class OwnInputs:
    """Puts the taps of a run to the rules of the components."""

    golden: GoldenModel
    run: Run
    _attention: dict[int, TeacherForcedAttention] = field(default_factory=dict)

    def judged(self) -> Iterator[Introduced]:
        """Every tap whose inputs were shown, in the order of computation within a layer."""
        yield from self._tap(None, "embed", {}, self._embedding)
        for layer in range(self.golden.config.n_layers):
            yield from self._layer(layer)
        last = self.golden.config.n_layers - 1
        needs = {"h": self._of("h_out", last), "pre": self._of("pre_out", last)}
        yield from self._tap(None, "final_norm", needs, self._head)
        yield from self._tap(None, "logits", needs, self._logits)

    def _layer(self, layer: int) -> Iterator[Introduced]:
        of, tap = self._of, partial(self._tap, layer)
        parameters = self.golden.layer(layer)
        yield from self._handed_on(layer)
        if layer in self.golden.config.engram_layer_ids:
            yield from tap("engram_hash", {}, partial(self._hash, layer))
            needs = {"h": of("engram_in", layer), "rows": of("engram_hash", layer)}
            yield from tap("engram_out", needs, partial(self._engram, layer))
        streams: dict[str, Source] = {"attn": partial(self._stream, layer), "ffn": of("h_mid", layer)}
        mixes: dict[str, Source] = {"attn": lambda call: self.run.mix(call, layer), "ffn": of("attn_pre", layer)}
        results = {"attn": ("attn_out", "h_mid"), "ffn": ("ffn_out", "h_out")}
        for name, entry in SUBLAYERS.items():
            stream, (out, written) = streams[name], results[name]
            for part, axes in (("pre", PER_STREAM), ("post", PER_STREAM), ("comb", COMB)):
                yield from tap(f"{name}_{part}", {"h": stream}, partial(self._coefficients, layer, name, part, axes))
            rule = partial(self._read, entry, parameters[f"{name}_norm.weight"])
            yield from tap(entry, {"h": stream, "pre": mixes[name]}, rule)
            yield from self._attention_of(layer) if name == "attn" else self._mixture_of(layer)
            needs = {
                "y": of(out, layer),
                "h": stream,
                "post": of(f"{name}_post", layer),
                "comb": of(f"{name}_comb", layer),
            }
            yield from tap(written, needs, partial(self._write, written))
        yield from tap("pre_out", {"same": of("ffn_pre", layer)}, partial(_same, "pre_out"))

    def _of(self, tap: str, layer: int | None) -> Source:
        return lambda call: self.run.get(call, tap, layer)

    def _stream(self, layer: int, call: int) -> Tensor | None:
        return self.run.stream(call, layer)

    # Putting taps to rules --------------------------------------------------------------------------------------------

    def _tap(self, layer: int | None, tap: str, needs: Mapping[str, Source], rules: Rules) -> Iterator[Introduced]:
        """Judge one tap in all calls that show it and what it is made of, joined along the positions."""
        yield from self._taps(layer, (tap,), needs, rules)

    def _taps(
        self, layer: int | None, taps: Sequence[str], needs: Mapping[str, Source], rules: Rules
    ) -> Iterator[Introduced]:
        calls, parts = [], []
        for call in range(len(self.run.trace.starts)):
            found = {name: source(call) for name, source in needs.items()}
            found |= {f"result {tap}": self.run.get(call, tap, layer) for tap in taps}
            found["input_ids"] = self.run.trace.part(call, "input_ids")
            present = {name: tensor for name, tensor in found.items() if tensor is not None}
            if len(present) == len(found) and all(_finite(present[name]) for name in needs):
                calls.append(call)
                parts.append(present)
        if not calls:
            return
        if taps == ("logits",):
            # A call has logits of its last position only.
            parts = [{n: t if n.startswith("result") else t[:, -1:] for n, t in part.items()} for part in parts]
            joined = {n: concatenate([p[n] for p in parts], axis=0 if n.startswith("result") else 1) for n in parts[0]}
        else:
            joined = {name: concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
        positions = [(call, position) for call in calls for position in self.run.trace.span(call)]
        for rule in rules(joined | {"calls": _numbers(calls)}):
            verdict = rule.judge({tap: joined[f"result {tap}"] for tap in taps})
            if verdict.tap == "gate_weights":
                # Weights are judged last: the choice itself was right.
                choice = Verdict("gate_indices", verdict.mode, True, verdict.count)
                yield self._introduced(layer, choice, positions)
            yield self._introduced(layer, verdict, positions)

    def _introduced(self, layer: int | None, verdict: Verdict, positions: list[tuple[int, int]]) -> Introduced:
        tap = verdict.tap
        component = "head" if layer is None else LAYER_TAPS[tap].component
        if tap == "embed":
            component = "embedding"
        place = verdict.index[1] if len(verdict.index) > 1 and verdict.axes[1:2] == ("position",) else None
        if verdict.axes[:1] == ("token",) and verdict.index:
            place = verdict.index[0] % len(positions)
        call, position = positions[-1] if place is None else positions[min(place, len(positions) - 1)]
        return Introduced(layer, component, tap, verdict, call, None if place is None else position)

    # The rules --------------------------------------------------------------------------------------------------------

    def _embedding(self, found: Inputs) -> list[Exact]:
        rows = self.golden.parameters.tensor("embed.weight")[found["input_ids"].data]
        return [Exact("embed", rows, ROWS)]

    def _handed_on(self, layer: int) -> Iterator[Introduced]:
        """What a layer receives is what the one before it returned, bit by bit."""
        with_engram = layer in self.golden.config.engram_layer_ids
        first = "engram_in" if with_engram else "h_in"
        if layer:
            for tap, before in ((first, "h_out"), ("pre_in", "pre_out")):
                yield from self._tap(layer, tap, {"same": self._of(before, layer - 1)}, partial(_same, tap))
        else:
            yield from self._tap(0, "pre_in", {}, self._one_hot)
        if with_engram:
            yield from self._tap(layer, "h_in", {"same": self._of("engram_out", layer)}, partial(_same, "h_in"))

    def _one_hot(self, found: Inputs) -> list[Exact]:
        mix = np.zeros((*found["input_ids"].shape, self.golden.config.hc_mult), np.float32)
        mix[..., 0] = 1.0
        return [Exact("pre_in", Tensor("F32", mix), PER_STREAM)]

    def _hash(self, layer: int, found: Inputs) -> list[Exact]:
        trace, config = self.run.trace, self.golden.config
        token_map = self.golden.token_map.data.astype(np.int64)
        ids = trace.input_ids.data.astype(np.int64)
        rows = engram.table_rows(config, layer, token_map, ids, trace.image_mask)
        expected = rows[:, self._spans(found)]
        return [Exact("engram_hash", Tensor("I64", expected), ("request", "position", "column"))]

    def _engram(self, layer: int, found: Inputs) -> list[Within]:
        weights, rows = self.golden.layer(layer).within("engram."), found["rows"].data
        table = self.golden.parameters.tensor(f"layers.{layer}.engram.embed.weight").shape[0]
        if ((rows < 0) | (rows >= table)).any():
            return []  # The hash itself was refused.
        mask = self.run.trace.image_mask
        mask = None if mask is None else mask[:, self._spans(found)]
        return [
            Within(
                "engram_out",
                engram.write(self.golden.config, weights, exact(found["h"]), rows, mask),
                "BF16",
                STREAMS,
            )
        ]

    def _coefficients(self, layer: int, sublayer: str, part: str, axes: tuple[str, ...], found: Inputs) -> list[Within]:
        parameters = self.golden.layer(layer)
        values = (parameters[f"hc_{sublayer}_{name}"] for name in ("fn", "scale", "base"))
        made = hyper_connections.coefficients(self.golden.config, exact(found["h"]), *values)
        return [Within(f"{sublayer}_{part}", getattr(made, part), "F32", axes)]

    def _read(self, tap: str, weight: np.ndarray, found: Inputs) -> list[Within]:
        mixed = hyper_connections.read(exact(found["h"]), exact(found["pre"])).rounded(BF16)
        return [Within(tap, rms_norm(mixed, weight, self.golden.config.norm_eps), "BF16", ROWS)]

    def _write(self, tap: str, found: Inputs) -> list[Within]:
        made = hyper_connections.write(*(exact(found[name]) for name in ("y", "h", "post", "comb")))
        return [Within(tap, made, "BF16", STREAMS)]

    def _mixture_of(self, layer: int) -> Iterator[Introduced]:
        entry, weights = {"x": self._of("ffn_in", layer)}, self.golden.layer(layer).within("ffn.")
        yield from self._taps(layer, ("gate_indices", "gate_weights"), entry, partial(self._gate, layer))
        choice = {"experts": self._of("gate_indices", layer), "routing": self._of("gate_weights", layer)}
        shown = [all(source(call) for source in choice.values()) for call in range(len(self.run.trace.starts))]
        needs = {**entry, **choice} if any(shown) else entry
        config = self.golden.config

        def rule(found: Inputs) -> list[Within]:
            x = exact(_flat(found["x"]))
            if "experts" not in found:
                made = mixture(config, weights, x, self._mask(found))
            else:
                experts = _flat(found["experts"]).data.astype(np.int64)
                if ((experts < 0) | (experts >= config.n_routed_experts)).any():
                    return []  # The gate itself was refused.
                made = combined(config, weights, x, exact(_flat(found["routing"])), experts)
            return [Within("ffn_out", made.reshape(*found["x"].shape), "BF16", ROWS)]

        yield from self._tap(layer, "ffn_out", needs, rule)

    def _gate(self, layer: int, found: Inputs) -> list[Expectation]:
        config = self.golden.config
        weights = self.golden.layer(layer).within("ffn.gate.")
        plain, biased = gate.scores(weights, exact(_flat(found["x"])), self._mask(found))
        rule = GateChoice(plain, biased, config.n_activated_experts, config.route_scale, ("token", "choice"))
        return [_Flattened(rule)]

    def _mask(self, found: Inputs) -> np.ndarray | None:
        mask = self.run.trace.image_mask
        return None if mask is None else mask[:, self._spans(found)].reshape(-1)

    def _spans(self, found: Inputs) -> list[int]:
        """Positions of the calls that were joined."""
        return [position for call in found["calls"].data.tolist() for position in self.run.trace.span(call)]

    def _head(self, found: Inputs) -> list[Within]:
        final, _ = head(self.golden.config, self.golden.parameters, exact(found["h"]), exact(found["pre"]))
        return [Within("final_norm", final, "BF16", ROWS)]

    def _logits(self, found: Inputs) -> list[Within]:
        _, logits = head(self.golden.config, self.golden.parameters, exact(found["h"]), exact(found["pre"]))
        flat = logits.swapaxes(0, 1).reshape(-1, logits.shape[-1])
        return [Within("logits", flat, "F32", ("request of a call", "token id"))]

    # Attention --------------------------------------------------------------------------------------------------------

    def _attention_of(self, layer: int) -> Iterator[Introduced]:
        """Judged as far as the inputs of the layer and of its sources were shown from the first call on."""
        trace = self.run.trace
        reading = trace.scenario.reading
        needed = needed_layers(self.golden, [layer], reading)
        prefix = min(self._calls_from_the_first(other) for other in needed)
        if not prefix:
            return
        bounded = self._bounded(prefix, reading == "literal")
        for call in range(prefix):
            positions = [(call, position) for position in trace.span(call)]
            results = {
                tap: tensor
                for tap, known in LAYER_TAPS.items()
                if known.component == "attention" and (tensor := self.run.get(call, tap, layer)) is not None
            }
            rules = [*tap_rules(trace, bounded, layer, call, reading), *self._candidates(layer, call, results)]
            for rule in (*rules, *output_rules(trace, bounded, layer, call, reading)):
                if all(tap in results for tap in rule.taps):
                    yield self._introduced(layer, rule.judge(results), positions)

    def _calls_from_the_first(self, layer: int) -> int:
        for call in range(len(self.run.trace.starts)):
            found = self.run.get(call, "attn_in", layer)
            if found is None or not _finite(found):
                return call
        return len(self.run.trace.starts)

    def _bounded(self, prefix: int, literal: bool) -> TeacherForcedAttention:
        """Bounds over the first calls, for every layer that shows its inputs so far."""
        if prefix in self._attention:
            return self._attention[prefix]
        golden, trace = self.golden, self.run.trace
        layers = [layer for layer in range(golden.config.n_layers) if self._calls_from_the_first(layer) >= prefix]
        inputs = {
            layer: concatenate([self.run.taps[call, layer, "attn_in"] for call in range(prefix)], axis=1).values()
            for layer in layers
        }
        spans = zip(trace.starts[:prefix], trace.lengths[:prefix], strict=True)
        selected = {}
        for layer in layers:
            for call in range(prefix):
                found = self.run.get(call, "selected", layer)
                rows = (trace.starts[call] + trace.lengths[call]) // max(1, golden.config.ratio(layer))
                if found is not None and ((found.data >= -1) & (found.data < rows)).all():
                    selected[layer, call] = found.data.astype(np.int64)
        weights = {layer: golden.layer(layer).within("attn.") for layer in layers}
        calls = [Call(start, length) for start, length in spans]
        made = TeacherForcedAttention(golden.config, weights, inputs, calls, selected, literal)
        return self._attention.setdefault(prefix, made)

    def _candidates(self, layer: int, call: int, results: Inputs) -> list[CandidateBlocks]:
        """Candidates by the target's own scores: like its selection, they are right or wrong whatever those are."""
        config, scores = self.golden.config, results.get("index_score")
        if layer != config.candidate_source_layer or scores is None or np.isnan(scores.values()).any():
            return []
        seen = indexer.visible_counts(config, layer, self.run.trace.positions[:, list(self.run.trace.span(call))])
        size, kept = config.candidate_block_size, config.candidate_topk_blocks
        return [CandidateBlocks("candidates", exact(scores), seen, size, kept, ("request", "position"))]


@dataclass(frozen=True)
class _Flattened:
    """A rule on tokens, put to taps that are kept by request and position."""

    inner: GateChoice
    mode: Mode = "choice"
    golden: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def taps(self) -> tuple[str, ...]:
        return self.inner.taps

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        return self.inner.judge({name: _flat(tensor) for name, tensor in results.items()})


def _same(tap: str, found: Inputs) -> list[Exact]:
    return [Exact(tap, found["same"], STREAMS if tap in ("h_in", "engram_in") else PER_STREAM)]


def _flat(tensor: Tensor) -> Tensor:
    """[B, T, ...] -> [B·T, ...]."""
    return tensor.reshape(tensor.shape[0] * tensor.shape[1], *tensor.shape[2:])


def _finite(tensor: Tensor) -> bool:
    """Nothing can be said of what follows from a NaN; whoever made it is judged where it was made."""
    return tensor.dtype in ("I32", "I64", "BOOL") or bool(np.isfinite(tensor.values()).all())


def _numbers(values: Sequence[int]) -> Tensor:
    return Tensor("I64", np.asarray(values, np.int64))
