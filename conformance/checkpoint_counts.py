"""Parameter counts of a checkpoint by the units of numerics.md 0: what the layout calls for, and what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from conformance.checkpoint_layout import DRAFT, TEXT, VISION, Layout
from conformance.config import ModelConfig


@dataclass(frozen=True)
class Count:
    """Learned elements of a unit, quantisation scales not counted."""

    unit: str
    expected: int
    found: int


def groups(config: ModelConfig) -> list[range]:
    """Each re-indexing layer with the layers that reuse its selection (24-27, 28-31, … when released)."""
    starts = [layer for layer in config.index_source_layers if not config.compresses(layer)]
    ends = [next((s for s in config.index_source_layers if s > start), config.n_layers) for start in starts]
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]


def counts(layout: Layout, found: Mapping[str, int]) -> list[Count]:
    """The table; `found` has the elements of each parameter that is there."""
    return [
        Count(
            unit,
            sum(layout.parameters[name].elements for name in names),
            sum(found.get(name, 0) for name in names),
        )
        for unit, names in _units(layout)
    ]


def _units(layout: Layout) -> Iterator[tuple[str, list[str]]]:
    by_layer: dict[int, list[str]] = {layer: [] for layer in range(layout.config.n_layers)}
    by_part: dict[str, list[str]] = {TEXT: [], DRAFT: [], VISION: []}
    for name, parameter in layout.parameters.items():
        by_part[parameter.part].append(name)
        if name.startswith("layers."):
            by_layer[int(name.split(".", 2)[1])].append(name)

    def of_layer(layer: int, select: Callable[[str], bool]) -> list[str]:
        prefix = len(f"layers.{layer}.")
        return [name for name in by_layer[layer] if select(name[prefix:])]

    grouped = groups(layout.config)
    if grouped:
        first = grouped[0][0]
        yield f"stream weights of one sublayer (layer {first})", of_layer(first, lambda n: n.startswith("hc_attn_"))
        yield f"one norm of the block (layer {first})", of_layer(first, lambda n: n == "attn_norm.weight")
        yield f"attention (layer {first})", of_layer(first, lambda n: n.startswith("attn."))
        yield f"mixture of experts (layer {first})", of_layer(first, lambda n: n.startswith("ffn."))
    for group in grouped:
        yield f"re-indexing layer {group[0]}", by_layer[group[0]]
        if len(group) > 1:
            yield f"reusing layers {group[1]}-{group[-1]}", [name for layer in group[1:] for name in by_layer[layer]]
        yield f"group {group[0]}-{group[-1]}", [name for layer in group for name in by_layer[layer]]
    if grouped:
        yield "all groups", [name for group in grouped for layer in group for name in by_layer[layer]]
    yield "Engram tables", [name for name in by_part[TEXT] if name.endswith("engram.embed.weight")]
    yield "text model", by_part[TEXT]
    yield "draft layers (mtp)", by_part[DRAFT]
    yield "vision tower and aligner", by_part[VISION]
    yield "total", list(layout.parameters)
