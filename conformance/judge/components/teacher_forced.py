"""Attention over a whole trace, every layer fed with the recorded input of its own call (design.md 4).

Everything a layer computes is bounded from its recorded input alone, so the bounds hold for a stateful implementation
that is stepped through the same inputs, whatever it kept from earlier calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from conformance.config import ModelConfig
from conformance.formats import BF16
from conformance.judge import deviations
from conformance.judge.bounded import Bounded, Floats, concatenate
from conformance.judge.choices import pinned_maxima
from conformance.judge.components import attention, compressor, indexer, sparse_attention, window
from conformance.judge.components.linear import Parameters

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Candidates(NamedTuple):
    """Positions [B,T,C] that are surely, or possibly, in the published mask."""

    surely: Bools
    possibly: Bools


class Choice(NamedTuple):
    """Positions [B,T,C]: the nominal selection, and those that an honest selection may differ in."""

    nominal: Bools
    maybe: Bools


@dataclass(frozen=True)
class Call:
    """One call of a trace: its first position and its length."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """Positions that exist after the call."""
        return self.start + self.length


LONGEST_STRETCH = 64
"""Positions whose bounds are computed together: one token at a time would take many times as long."""


def stretches(calls: Sequence[Call]) -> list[range]:
    """Consecutive calls put together up to `LONGEST_STRETCH` positions; a longer call stays alone."""
    found: list[range] = []
    for number, call in enumerate(calls):
        if found and call.end - calls[found[-1].start].start <= LONGEST_STRETCH:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


class LayerRows:
    """What one layer derives from its whole input sequence x [B,P,D], call boundaries aside.

    Rows that others attend to exist for every position; what belongs to a query only for the Q positions in `queried`,
    by default all.
    """

    def __init__(
        self, config: ModelConfig, layer: int, weights: Parameters, x: Floats, queried: Ints | None = None
    ) -> None:
        self.config, self.layer, self.weights = config, layer, weights
        self.x = Bounded.exact(x)
        self.positions: Ints = np.broadcast_to(np.arange(x.shape[1]), x.shape[:2])
        queried = np.arange(x.shape[1]) if queried is None else queried
        self.queried: Ints = np.broadcast_to(queried, (x.shape[0], queried.size))
        self._asking = Bounded.exact(x[:, queried])

    @cached_property
    def q_latent(self) -> Bounded:
        """Before the last rounding, [B,Q,q_lora_rank]."""
        return attention.query_latent(self.config, self.weights, self._asking)

    @cached_property
    def queries(self) -> Bounded:
        """Before the last rounding, [B,Q,H,d]."""
        return attention.queries(self.config, self.layer, self.weights, self.q_latent.rounded(BF16), self.queried)

    @cached_property
    def window_rows(self) -> Bounded:
        """[B,P,d]."""
        return window.window_rows(self.config, self.layer, self.weights, self.x, self.positions)

    @cached_property
    def carry(self) -> tuple[Bounded, Bounded | None]:
        """kv and gate of every token, fp32 [B,P,d]."""
        return compressor.projections(self.config, self.layer, self.weights, self.x)

    @cached_property
    def latents(self) -> Bounded:
        """Before the last rounding, [B,n,d]."""
        return compressor.latents(self.config, self.layer, self.weights, self.x)

    @cached_property
    def group_positions(self) -> Ints:
        """First position of each group, [B,n]."""
        count = self.x.shape[1] // self.config.ratio(self.layer)
        return np.broadcast_to(np.arange(count) * self.config.ratio(self.layer), (self.x.shape[0], count))

    @cached_property
    def compressed_rows(self) -> Bounded:
        """[B,n,d]."""
        return compressor.compressed_rows(self.config, self.layer, self.latents.rounded(BF16), self.group_positions)

    @cached_property
    def index_keys(self) -> Bounded:
        """[B,n,index_head_dim]."""
        latent = self.latents.rounded(BF16)
        return indexer.index_keys(self.config, self.layer, self.weights, latent, self.group_positions)

    @cached_property
    def index_queries(self) -> Bounded:
        """[B,Q,index heads,index_head_dim]."""
        latent = self.q_latent.rounded(BF16)
        return indexer.index_queries(self.config, self.layer, self.weights, latent, self.queried)

    @cached_property
    def index_weights(self) -> Bounded:
        """Before the last rounding, [B,Q,index heads]."""
        return indexer.index_weights(self.config, self.weights, self._asking)


class TeacherForcedAttention:
    """Bounds for every layer of a stack of attentions that share one runtime.

    `inputs` holds the recorded input [B,P,D] of each layer that takes part; sources must be among them.  `selected`
    gives recorded selections [B,T,k] by (layer, call) where there are any: they choose the nominal one among ties.

    What a position is answered depends on no later one, so that bounds are computed for stretches of several calls,
    except in the literal reading, where keys depend on the calls.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[int, Parameters],
        inputs: Mapping[int, Floats],
        calls: Sequence[Call],
        selected: Mapping[tuple[int, int], Ints],
        literal: bool,
    ) -> None:
        self.config = config
        self.calls = calls
        self.rows = {layer: LayerRows(config, layer, weights[layer], inputs[layer]) for layer in sorted(inputs)}
        self._selected = selected
        self._literal = literal
        self._stretches = [range(call, call + 1) for call in range(len(calls))] if literal else stretches(calls)
        self._stretch_of = [number for number, part in enumerate(self._stretches) for _ in part]
        self._scores: dict[tuple[int, int], Bounded] = {}
        self._restricted: dict[tuple[int, int], tuple[Floats, Floats, Bounded]] = {}
        self._choices: dict[tuple[int, int], Choice] = {}
        self._outputs: dict[tuple[int, int], Bounded] = {}

    def rows_after(self, layer: int, call: int) -> int:
        """Compressed rows that exist for a layer after a call."""
        return self.calls[call].end // self.config.ratio(layer)

    def produced(self, layer: int, call: int) -> slice:
        """The compressed rows that a source writes in a call."""
        ratio = self.config.ratio(layer)
        return slice(self.calls[call].start // ratio, self.calls[call].end // ratio)

    def output(self, layer: int, call: int) -> Bounded:
        """Attention output of a call before its rounding, [B,T,D]."""
        key = (layer, self._stretch_of[call])
        if key not in self._outputs:
            self._outputs[key] = self._output(*key)
        return self._outputs[key][:, self._inside(call)]

    def restricted(self, layer: int, call: int) -> tuple[Floats, Floats, Bounded]:
        """Lowest and highest rounded scores [B,T,C] with the candidates applied, and both as one expected tap.

        A position that may or may not be a candidate has no lower end; in the tap nothing is known of it.
        """
        low, high, tap = self._restricted_scores(layer, self._stretch_of[call])
        part = (slice(None), self._inside(call), slice(self.rows_after(layer, call)))
        return low[part], high[part], tap[part]

    def _inside(self, call: int) -> slice:
        """The positions of a call inside its stretch."""
        first = self._span(self._stretch_of[call]).start
        return slice(self.calls[call].start - first, self.calls[call].end - first)

    def _span(self, stretch: int) -> slice:
        part = self._stretches[stretch]
        return slice(self.calls[part[0]].start, self.calls[part[-1]].end)

    def _positions(self, layer: int, stretch: int) -> Ints:
        return self.rows[layer].positions[:, self._span(stretch)]

    def _existing(self, layer: int, stretch: int) -> int:
        """Compressed rows that exist for a layer after a stretch."""
        return self.rows_after(layer, self._stretches[stretch][-1])

    def _keys_read(self, layer: int, stretch: int) -> Bounded:
        """The index keys that an indexing layer scores against in a stretch, [B,C,index_head_dim].

        In the literal reading of the published code the keys' slot is one a process: a source that completes no group
        in a call publishes nothing, and it and its readers score against whatever was published last (numerics.md 6.4).
        """
        owner = self.config.kv_source(layer)
        if self._literal:
            owner = self._last_publisher(layer, self._stretches[stretch][0])
        return self.rows[owner].index_keys[:, : self._existing(layer, stretch)]

    def _last_publisher(self, layer: int, call: int) -> int:
        owners = [owner for owner in self.config.kv_source_layers if owner in self.rows]
        for earlier in range(call, -1, -1):
            for owner in sorted(owners, reverse=True):
                part = self.produced(owner, earlier)
                if part.stop > part.start and (earlier < call or owner <= layer):
                    return owner
        return self.config.kv_source(layer)

    def _index_scores(self, layer: int, stretch: int) -> Bounded:
        """Index scores of an indexing layer before their last rounding, [B,T,C]; candidates not yet applied."""
        key = (layer, stretch)
        if key not in self._scores:
            rows, span = self.rows[layer], self._span(stretch)
            count = self._existing(layer, stretch)
            visible = indexer.visibility(self.config, layer, self._positions(layer, stretch), count)
            head_weights = rows.index_weights[:, span].rounded(BF16)
            keys = self._keys_read(layer, stretch)
            self._scores[key] = indexer.index_scores(rows.index_queries[:, span], head_weights, keys, visible)
        return self._scores[key]

    def _candidates(self, stretch: int) -> Candidates:
        """What the candidate source publishes."""
        layer = self.config.candidate_source_layer
        scores = self._index_scores(layer, stretch).rounded(deviations.score_format())
        size, total = self.config.candidate_block_size, scores.shape[-1]
        visible = indexer.visible_counts(self.config, layer, self._positions(layer, stretch))
        low, high, _ = pinned_maxima(scores, visible, size)
        surely, maybe = indexer.membership(low, high, self.config.candidate_topk_blocks)
        spread = np.repeat(surely, size, -1)[..., :total], np.repeat(surely | maybe, size, -1)[..., :total]
        return Candidates(*spread)

    def _restricted_scores(self, layer: int, stretch: int) -> tuple[Floats, Floats, Bounded]:
        """`restricted` for a stretch."""
        key = (layer, stretch)
        if key not in self._restricted:
            scores = self._index_scores(layer, stretch)
            rounded = scores.rounded(deviations.score_format())
            low, high, tap = rounded.low, rounded.high, scores
            if self.config.masked_by_candidates(layer):
                surely, possibly = self._candidates(stretch)
                low, high = np.where(surely, low, -np.inf), np.where(possibly, high, -np.inf)
                tap = indexer.masked(scores, possibly)
                undecided = possibly & ~surely & np.isfinite(tap.value)
                tap = Bounded(tap.value, np.where(undecided, np.inf, tap.error))
            self._restricted[key] = low, high, tap
        return self._restricted[key]

    def _choice(self, layer: int, stretch: int) -> Choice:
        """The selection that a layer uses in a stretch, its own or its source's."""
        source = self.config.index_source(layer)
        key = (source, stretch)
        if key not in self._choices:
            low, high, _ = self._restricted_scores(source, stretch)
            surely, maybe = indexer.membership(low, high, self.config.index_topk)
            total = low.shape[-1]
            visible = indexer.visibility(self.config, source, self._positions(source, stretch), total)
            # Where candidates hold fewer visible positions than k, filling up with others is optional (6.4).
            short = (low > -np.inf).sum(-1, keepdims=True) < np.minimum(self.config.index_topk, visible.sum(-1))[
                ..., None
            ]
            maybe = maybe | (short & visible & ~surely)
            nominal = surely
            if maybe.any():
                nominal = surely | (maybe & (high >= _kth_largest(high, self.config.index_topk)))
            self._choices[key] = Choice(self._as_recorded(nominal, source, stretch), maybe)
        return self._choices[key]

    def _as_recorded(self, nominal: Bools, source: int, stretch: int) -> Bools:
        """A choice [B,T,C] with what was recorded of it in its place."""
        # A recording of the published code chose by other scores than those of a declared deviation.
        if deviations.any_active():
            return nominal
        chosen = nominal.copy()
        for call in self._stretches[stretch]:
            if (source, call) in self._selected:
                listed = sparse_attention.counts_of(self._selected[source, call], nominal.shape[-1])
                chosen[:, self._inside(call)] = listed > 0
        return chosen

    def _output(self, layer: int, stretch: int) -> Bounded:
        """`output` for a stretch."""
        rows, span, window_size = self.rows[layer], self._span(stretch), self.config.window_size
        positions = self._positions(layer, stretch)
        # The window reaches back window_size - 1 positions before the stretch's first.
        first = max(0, span.start - window_size + 1)
        values = rows.window_rows[:, first : span.stop]
        listed = window.window_mask(positions - first, values.shape[1], window_size)
        maybe: Bools | None = None
        if self.config.ratio(layer):
            count = self._existing(layer, stretch)
            source = self.config.kv_source(layer)
            if count:
                values = concatenate([values, self.rows[source].compressed_rows[:, :count]], 1)
                choice = self._choice(layer, stretch)
                maybe = np.concatenate([np.zeros_like(listed), choice.maybe], -1)
                listed = np.concatenate([listed, choice.nominal], -1)
        o = sparse_attention.attend(
            rows.queries[:, span].rounded(BF16),
            values,
            listed.astype(np.float64),
            maybe if maybe is not None and maybe.any() else None,
            rows.weights["attn_sink"],
            self.config.head_dim**-0.5,
        )
        return attention.output(self.config, layer, rows.weights, o.rounded(BF16), positions)


def _kth_largest(values: Floats, k: int) -> Floats:
    ordered = np.sort(values, -1)
    kth: Floats = ordered[..., [max(0, values.shape[-1] - k)]]
    return kth
