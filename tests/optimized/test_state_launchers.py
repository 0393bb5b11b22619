"""What the launchers that work on state say to arguments that do not belong together."""

from __future__ import annotations

from optimized.device import DEVICE

# ruff: isort: split
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.fixtures import Fixtures
from optimized import compressor, packed_attention, rows
from optimized.config import Config
from optimized.runtime import Batch, Runtime

CONFIG = Config.from_mapping(Fixtures.open(None).model("tiny").config)
PAIRED = next(layer for layer in CONFIG.kv_source_layers if CONFIG.ratio(layer) == 2)
WIDTH = CONFIG.head_dim


def runtime(**changed: Any) -> Runtime:
    given = {"slots": 2, "capacity": 16, "tokens": 8, "drafts": 1, "layer_ids": [0, PAIRED]}
    return Runtime(CONFIG, **(given | changed))


def begin(slots: Sequence[int] = (0, 1), starts: Sequence[int] = (0, 0), length: int = 1) -> Batch:
    return runtime().begin(slots, starts, length)


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16, device=DEVICE)


def write(**changed: Any) -> None:
    held, batch = runtime(), begin()
    given = {
        "form": held.window_format,
        "x": bf16(2, 1, WIDTH),
        "tables": held.rotary(0),
        "slots": batch.slots,
        "start": batch.start,
        "length": 1,
        "ratio": 1,
        "out": held.layers[0].window,
    }
    rows.write_rows(**(given | changed))


def pool(layer_id: int = PAIRED, width: int = WIDTH) -> torch.Tensor:
    projected = torch.ones(2, 1, width, device=DEVICE)
    state = runtime().layers[layer_id]
    return compressor.pool(projected, projected, 2, state, begin(), bf16(WIDTH), 1e-6)


def attend(length: int = 1, **changed: Any) -> torch.Tensor:
    given = {"q": bf16(2, length, CONFIG.n_heads, WIDTH), "sink": torch.ones(CONFIG.n_heads, device=DEVICE)}
    return packed_attention.packed_attention(runtime(), 0, begin(length=length), **(given | changed))


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same shape, every second row of a larger tensor."""
    return x.repeat_interleave(2, dim=1)[:, ::2]


WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no-slots": (lambda: runtime(slots=0), ValueError, "slots: expected at least 1, got 0"),
    "drafts-below-nothing": (lambda: runtime(drafts=-1), ValueError, "drafts: expected at least 0, got -1"),
    "slot-out-of-range": (lambda: begin(slots=(0, 2)), ValueError, r"slots: expected 0...1, got \[0, 2\]"),
    "slot-twice": (lambda: begin(slots=(1, 1)), ValueError, r"slots: one comes twice in \[1, 1\]"),
    "starts-missing": (lambda: begin(starts=(0,)), ValueError, "starts: expected one position for each of 2 slots"),
    "start-before-zero": (lambda: begin(starts=(0, -1)), ValueError, r"from \[0, -1\] on do not lie within"),
    "capacity-exceeded": (lambda: begin(starts=(0, 15), length=2), ValueError, "within a capacity of 16"),
    "tokens-exceeded": (lambda: begin(length=5), ValueError, "2 requests of 5 tokens, of 1...8 tokens in all"),
    "advanced-beyond": (
        lambda: (held := runtime()).advance(held.begin([0], [15], 1)),
        ValueError,
        "1 more tokens from 16 on exceed 16",
    ),
    "state-of-another-runtime": (
        lambda: runtime().restore(0, runtime(capacity=32).save(0)),
        ValueError,
        "saved: the state of a request in a runtime of other sizes",
    ),
    "rows-fp32": (lambda: write(x=bf16(2, 1, WIDTH).float()), TypeError, "x: expected bf16"),
    "rows-width": (lambda: write(x=bf16(2, 1, WIDTH // 2)), ValueError, rf"x: expected \[B, n, {WIDTH}\]"),
    "rows-slots": (lambda: write(slots=begin(slots=[0], starts=[0]).slots), ValueError, r"slots: expected shape \[2\]"),
    "rows-out-dtype": (
        lambda: write(out=runtime().layers[0].window.view(torch.int8)),
        TypeError,
        "out: expected torch.uint8, got torch.int8",
    ),
    "rows-out-of-another-format": (
        lambda: write(out=runtime().layers[PAIRED].compressed),
        ValueError,
        r"out: expected \[slots, rows, 66\]",
    ),
    "rows-out-strided": (
        lambda: write(out=strided(runtime().layers[0].window)),
        ValueError,
        "out: not contiguous, a copy of it would be written to",
    ),
    "rows-norm": (lambda: write(norm=(bf16(WIDTH - 1), 1e-6)), ValueError, r"norm: expected shape \[64\]"),
    "rows-tables": (lambda: write(tables=(bf16(4), bf16(4))), ValueError, r"tables: \[4\] and \[4\] do not go with"),
    "rows-unpacked-strided": (
        lambda: rows.unpack_rows(runtime().window_format, strided(runtime().layers[0].window)),
        ValueError,
        "rows: not contiguous",
    ),
    "pool-without-carry": (lambda: pool(layer_id=0), ValueError, "state: the layer keeps no carry"),
    "pool-width": (lambda: pool(width=WIDTH + 1), ValueError, r"kv: expected shape \[2, 1, 64\]"),
    "attend-queries": (lambda: attend(q=bf16(2, 1, 3, WIDTH)), ValueError, r"q: expected shape \[2, 1, 4, 64\]"),
    "attend-sink": (lambda: attend(sink=torch.ones(3, device=DEVICE)), ValueError, r"sink: expected shape \[4\]"),
    "attend-more-than-the-ring-holds": (
        lambda: attend(length=3),
        ValueError,
        "batch: 3 tokens at once have overwritten rows that they need; give call_rows",
    ),
    "attend-call-rows": (
        lambda: attend(length=3, call_rows=torch.zeros(2, 2, 66, dtype=torch.uint8, device=DEVICE)),
        ValueError,
        r"call_rows: expected shape \[2, 3, 66\], got \[2, 2, 66\]",
    ),
    "attend-no-split": (lambda: attend(splits=0), ValueError, "splits: expected at least 1, got 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_with_their_name(name: str) -> None:
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_batch_advances_where_it_lies() -> None:
    """A captured step reads the same addresses in every replay."""
    held = runtime()
    batch = held.begin([1, 0], [2, 5], 2)
    places = [tensor.data_ptr() for tensor in (batch.slots, batch.start, batch.positions, held.position)]
    held.advance(batch)
    assert places == [tensor.data_ptr() for tensor in (batch.slots, batch.start, batch.positions, held.position)]
    assert batch.positions.tolist() == [[4, 5], [7, 8]]
    assert held.position.tolist() == [9, 6]
    assert batch.furthest == 9


def test_a_slot_is_saved_and_restored_alone() -> None:
    held, other = runtime(), runtime()
    for number, part in enumerate(held.layers[PAIRED].tensors().values()):
        part.copy_(torch.arange(part.numel(), device=DEVICE).view(part.shape) % 97 + number)
    held.begin([1], [3], 2)
    other.restore(0, held.save(1))
    for name, part in held.layers[PAIRED].tensors().items():
        found = other.layers[PAIRED].tensors()[name]
        assert torch.equal(found[0], part[1])
        assert not found[1].any()
    assert other.position.tolist() == [5, 0]


def test_shared_rows_take_what_is_deployed() -> None:
    """890 bytes a token of context at the released sizes; 528 a window row (numerics.md 6.3)."""
    released = replace(CONFIG, head_dim=512, index_head_dim=128, kv_source_layers=(0, 1, 2, 3), n_layers=4)
    released = replace(released, compress_ratios=(2, 2, 2, 1))
    held = Runtime(released, 1, 64, 8)
    shared = sum(
        part.numel()
        for state in held.layers.values()
        for part in (state.compressed, state.index_keys)
        if part is not None
    )
    assert shared == 890 * 64
    assert held.window_format.bytes == 528
