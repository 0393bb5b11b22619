"""The taps of a trace: in which order they are computed, by which component, and in which column they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["values", "exact", "set", "experts", "mask"]
"""How two recordings of a tap are compared: by distance, bit by bit, or as a choice."""


@dataclass(frozen=True)
class TracedTap:
    """One tap of `fixtures/FORMAT.md` as a trace sees it."""

    component: str
    """What computes it, in the words of a sentence: "layer 7's mixture"."""
    column: str
    """Heading under which it is shown."""
    kind: Kind = "values"


COLUMNS = (
    "engr",
    "mix",
    "in",
    "q",
    "wind",
    "comp",
    "indx",
    "sel",
    "attn",
    "mid",
    "mix2",
    "ffin",
    "gate",
    "ffn",
    "out",
)
"""Columns of the table, in the order of computation."""

LAYER_TAPS: Mapping[str, TracedTap] = {
    "engram_in": TracedTap("residual", "engr"),
    "engram_hash": TracedTap("Engram hash", "engr", "exact"),
    "engram_out": TracedTap("Engram", "engr"),
    "h_in": TracedTap("residual", "in"),
    "pre_in": TracedTap("mix handed on", "mix"),
    "attn_pre": TracedTap("hyper-connection", "mix"),
    "attn_post": TracedTap("hyper-connection", "mix"),
    "attn_comb": TracedTap("hyper-connection", "mix"),
    "attn_in": TracedTap("read before attention", "in"),
    "q_latent": TracedTap("attention", "q"),
    "attn_q": TracedTap("attention", "q"),
    "window_rows": TracedTap("attention", "wind"),
    "latent": TracedTap("attention", "comp"),
    "compressed_rows": TracedTap("attention", "comp"),
    "index_keys": TracedTap("attention", "indx"),
    "index_q": TracedTap("attention", "indx"),
    "index_weights": TracedTap("attention", "indx"),
    "index_score": TracedTap("attention", "indx"),
    "candidates": TracedTap("attention", "sel", "mask"),
    "selected": TracedTap("attention", "sel", "set"),
    "attn_o": TracedTap("attention", "attn"),
    "attn_out": TracedTap("attention", "attn"),
    "h_mid": TracedTap("write after attention", "mid"),
    "ffn_pre": TracedTap("hyper-connection", "mix2"),
    "ffn_post": TracedTap("hyper-connection", "mix2"),
    "ffn_comb": TracedTap("hyper-connection", "mix2"),
    "ffn_in": TracedTap("read before the mixture", "ffin"),
    "gate_indices": TracedTap("gate", "gate", "experts"),
    "gate_weights": TracedTap("gate", "gate"),
    "ffn_out": TracedTap("mixture", "ffn"),
    "h_out": TracedTap("write after the mixture", "out"),
    "pre_out": TracedTap("hyper-connection", "out"),
}
"""In the order of computation.  The lists of rows (`window_slots`, `attn_list`) follow from positions and `selected`,
and every implementation may order them and number its rows as it likes: they are not compared."""

BEFORE: Mapping[str, TracedTap] = {"embed": TracedTap("embedding", "")}
"""Taps of a call before its layers."""
AFTER: Mapping[str, TracedTap] = {
    "main_hidden": TracedTap("hidden states for the draft", ""),
    "final_norm": TracedTap("head", ""),
    "logits": TracedTap("head", ""),
}
"""Taps of a call after its layers.  `output_ids` are judged against the target's own logits by `model` cases."""

CALL_TAPS: Mapping[str, TracedTap] = {**BEFORE, **AFTER}
CHOICES = tuple(name for name, tap in LAYER_TAPS.items() if tap.kind in ("set", "experts", "mask"))
"""Discrete taps: where one honestly differs, everything behind it does."""


def ordinal(layer: int | None, tap: str, layer_count: int) -> tuple[int, int]:
    """Sorts taps of one call by the order of computation."""
    if layer is not None:
        return layer, list(LAYER_TAPS).index(tap)
    return (-1 if tap in BEFORE else layer_count), list(CALL_TAPS).index(tap)


def named(layer: int | None, tap: str) -> str:
    """A tap as FORMAT.md names it within a call."""
    return tap if layer is None else f"layer{layer}/{tap}"
