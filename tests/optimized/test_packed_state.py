"""Packed state against stateless kernels: rows at their places, pooling with a carry, attention over packed rows."""

from __future__ import annotations

from optimized.device import DEVICE

# ruff: isort: split
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from conformance.fixtures import Fixtures
from optimized import compressor, norm, packed_attention, quantize, rotary, rows
from optimized.config import Config
from optimized.runtime import Batch, Runtime
from optimized.sparse_attention import sparse_attention

CONFIG = Config.from_mapping(Fixtures.open(None).model("tiny").config)
PAIRED = next(layer for layer in CONFIG.kv_source_layers if CONFIG.ratio(layer) == 2)
SINGLE = next(layer for layer in CONFIG.kv_source_layers if CONFIG.ratio(layer) == 1)
WINDOW_ONLY = 0
EPS = 1e-6


class Numbers:
    """Random tensors, the same in every run."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def bf16(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).bfloat16().to(DEVICE)

    def fp32(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE)

    def ints(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32).to(DEVICE)


def positions_of(batch: Batch, ratio: int) -> torch.Tensor:
    """The first token of every group that a call touches from its first on: int64 [B,n]."""
    groups = -(-batch.length // ratio)
    return (batch.start.unsqueeze(1) // ratio + torch.arange(groups, device=DEVICE)) * ratio


@pytest.mark.parametrize(
    "form", [rows.RowFormat("fp8", 80), rows.RowFormat("fp4_e4m3", 40), rows.RowFormat("fp4_e8m0", 96)]
)
def test_rows_unpack_to_what_the_quantiser_leaves(form: rows.RowFormat) -> None:
    """Codes, then scales, as the quantisers give them; a short last group too."""
    x = Numbers(1).bf16(2, 5, form.width) * torch.logspace(-3, 3, 5).bfloat16().to(DEVICE).view(1, 5, 1)
    codes, scales = getattr(quantize, f"quantize_{form.form}")(x)
    packed = torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=-1)
    assert packed.shape[-1] == form.bytes
    assert torch.equal(rows.unpack_rows(form, packed), getattr(quantize, f"fake_quantize_{form.form}")(x))


CALLS = {
    "from the first token": ((2, 0), (0, 0), 4),
    "one token each at different positions": ((1, 2), (7, 20), 1),
    "over the wrap": ((0, 2), (17, 30), 6),
    "more than the ring holds": ((1,), (3,), 50),
}


@pytest.mark.parametrize(("slots", "starts", "length"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("kind", ["window", "compressed", "index keys"])
def test_rows_are_written_to_their_places(kind: str, slots: Sequence[int], starts: Sequence[int], length: int) -> None:
    """As norm, rotation and quantiser one after another, and nothing but the rows of complete groups is touched."""
    numbers, runtime = Numbers(2), Runtime(CONFIG, 3, 64, 64, drafts=3)
    state, ratio = runtime.layers[PAIRED], 1 if kind == "window" else 2
    form, out = {
        "window": (runtime.window_format, state.window),
        "compressed": (runtime.compressed_format, state.compressed),
        "index keys": (runtime.index_key_format, state.index_keys),
    }[kind]
    assert out is not None
    out.fill_(0xA5)
    batch = runtime.begin(slots, starts, length)
    places = positions_of(batch, ratio)
    x, weight = numbers.bf16(len(slots), places.shape[1], form.width), numbers.bf16(form.width)
    normed = None if kind == "compressed" else (weight, EPS)
    rows.write_rows(form, x, runtime.rotary(PAIRED), batch.slots, batch.start, length, ratio, out, normed)
    before = x if normed is None else norm.rms_norm(x, *normed)
    expected = rotary.rotate(CONFIG, PAIRED, before, places, form=form.form)
    untouched = torch.ones(out.shape[:2], dtype=torch.bool)
    found = rows.unpack_rows(form, out)
    for request, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        complete = range(start // ratio, (start + length) // ratio)
        for group in complete[-out.shape[1] :]:
            untouched[slot, group % out.shape[1]] = False
            row = expected[request, group - start // ratio]
            assert torch.equal(found[slot, group % out.shape[1]], row), (slot, group)
    assert (out.cpu()[untouched] == 0xA5).all()


def pooled(kv: torch.Tensor, score: torch.Tensor, weight: torch.Tensor, ratio: int) -> torch.Tensor:
    """All groups of one request at once, in float64 up to the rounding points: [T,d] -> [⌊T/r⌋,d]."""
    whole = kv.shape[0] // ratio * ratio
    by_group = [tensor[:whole].double().unflatten(0, (-1, ratio)) for tensor in (kv, score)]
    groups = (by_group[0] * by_group[1].softmax(dim=1)).sum(dim=1).bfloat16().double()
    normed = groups * torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + EPS) * weight.double()
    return normed.bfloat16()


@pytest.mark.parametrize("lengths", [[1] * 9, [3, 1, 5], [9], [8, 1], [2, 7]])
@pytest.mark.parametrize("ratio", [2, 4])
def test_pooling_in_pieces_is_pooling_at_once(ratio: int, lengths: Sequence[int]) -> None:
    """Two requests three tokens apart, each call bringing both as many; a neighbour's slot is full of other numbers."""
    config = replace(CONFIG, compress_ratios=tuple(ratio if r == 2 else r for r in CONFIG.compress_ratios))
    numbers, width, shift = Numbers(3), CONFIG.head_dim, 3
    runtime = Runtime(config, 3, 64, 64, drafts=1, layer_ids=[PAIRED])
    state = runtime.layers[PAIRED]
    assert state.carry_kv is not None
    assert state.carry_score is not None
    state.carry_kv.fill_(1e3)
    state.carry_score.fill_(50.0)
    kv, score = numbers.fp32(2, 20, width), 3 * numbers.fp32(2, 20, width)
    weight = numbers.bf16(width)

    def call(slots: Sequence[int], starts: Sequence[int], length: int) -> torch.Tensor:
        batch = runtime.begin(slots, starts, length)
        parts = [
            torch.stack([tensor[slot // 2, start : start + length] for slot, start in zip(slots, starts, strict=True)])
            for tensor in (kv, score)
        ]
        return compressor.pool(parts[0], parts[1], ratio, state, batch, weight, EPS)

    expected = [pooled(kv[request], score[request], weight, ratio) for request in range(2)]
    call([2], [0], shift)
    start = 0
    for length in lengths:
        starts = (start, start + shift)
        latent = call([0, 2], starts, length)
        for request, first in enumerate(starts):
            rows_found = latent[request].float()
            complete = range(first // ratio, (first + length) // ratio)
            right = expected[request][complete.start : complete.stop].float()
            # The sum is rounded to bf16, whose neighbour the norm may see: an ulp, and one more of the result's own.
            assert torch.allclose(rows_found[: len(complete)], right, rtol=2.0**-6, atol=2.0**-8)
            assert not rows_found[len(complete) :].any()
        start += length


class Attended:
    """Requests with a history, a call of theirs, and what the stateless kernel says of the same rows."""

    def __init__(self, layer_id: int, slots: Sequence[int], starts: Sequence[int], length: int, drafts: int) -> None:
        self.numbers, self.layer_id, self.length, self.starts = Numbers(4), layer_id, length, starts
        self.runtime = runtime = Runtime(CONFIG, 3, 64, 64, drafts, [WINDOW_ONLY, PAIRED, PAIRED + 1])
        self.state = runtime.layers[layer_id]
        self.state.window.fill_(0x7E)
        total = max(starts) + length
        self.kv = self.numbers.bf16(len(slots), total, CONFIG.head_dim)
        for request, (slot, start) in enumerate(zip(slots, starts, strict=True)):
            if start:
                self.write(runtime.begin([slot], [0], start), self.kv[request : request + 1, :start])
        self.batch = runtime.begin(slots, starts, length)
        new = torch.stack([self.kv[request, start : start + length] for request, start in enumerate(starts)])
        self.call_rows = None
        if length > drafts + 1:
            shape = (len(slots), length, runtime.window_format.bytes)
            self.call_rows = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
            own = replace(self.batch, slots=torch.arange(len(slots), device=DEVICE))
            self.write(own, new, self.call_rows)
        else:
            self.write(self.batch, new)
        self.q = self.numbers.bf16(len(slots), length, CONFIG.n_heads, CONFIG.head_dim)
        self.sink = self.numbers.fp32(CONFIG.n_heads)

    def write(self, batch: Batch, kv: torch.Tensor, out: torch.Tensor | None = None) -> None:
        form, tables = self.runtime.window_format, self.runtime.rotary(self.layer_id)
        target = self.state.window if out is None else out
        rows.write_rows(form, kv, tables, batch.slots, batch.start, batch.length, 1, target)

    def compressed(self) -> torch.Tensor | None:
        """Random rows in the layer's source, and a selection of them with -1 anywhere: what the rows stand for."""
        if not CONFIG.ratio(self.layer_id):
            return None
        held = self.runtime.source(self.layer_id).compressed
        assert held is not None
        form = self.runtime.compressed_format
        x = self.numbers.bf16(*held.shape[:2], form.width)
        codes, scales = quantize.quantize_fp4_e4m3(x)
        held.copy_(torch.cat((codes, scales.view(torch.uint8)), dim=-1))
        tokens = self.batch.size * self.length
        self.runtime.selected[:tokens] = self.numbers.ints(-1, held.shape[1], tokens, CONFIG.index_topk)
        self.runtime.selected[0] = -1
        return quantize.fake_quantize_fp4_e4m3(x)

    def expected(self, compressed: torch.Tensor | None) -> torch.Tensor:
        """Every request by itself, over rows and a list that are made here."""
        found = []
        for request, start in enumerate(self.starts):
            end = start + self.length
            places = torch.arange(end, device=DEVICE).unsqueeze(0)
            kv = rotary.rotate(CONFIG, self.layer_id, self.kv[request : request + 1, :end], places, form="fp8")[0]
            newest = torch.arange(start, end, device=DEVICE).unsqueeze(1)
            listed = newest - torch.arange(CONFIG.window_size, device=DEVICE)
            if compressed is not None:
                own = slice(request * self.length, (request + 1) * self.length)
                selected = self.runtime.selected[own]
                listed = torch.cat((listed, torch.where(selected >= 0, selected + end, -1)), dim=1)
                kv = torch.cat((kv, compressed[self.batch.slots[request]]))
            lists = listed.clamp(min=-1).to(torch.int32)[None]
            one = slice(request, request + 1)
            found.append(sparse_attention(self.q[one], kv[None], lists, self.sink, CONFIG.head_dim**-0.5))
        return torch.cat(found)


ATTENDED = {
    "single token": ((1,), (0,), 1, 0, None),
    "decode at different positions": ((2, 0), (3, 41), 1, 0, None),
    "decode, list split": ((2, 0), (16, 31), 1, 2, 3),
    "drafts in the ring": ((0, 2), (5, 30), 4, 3, None),
    "prompt": ((2,), (0,), 19, 0, None),
    "chunk behind a ring, list split": ((1, 2), (1, 20), 5, 3, 2),
}


@pytest.mark.parametrize("layer_id", [WINDOW_ONLY, PAIRED + 1], ids=["window only", "reusing"])
@pytest.mark.parametrize(("slots", "starts", "length", "drafts", "splits"), ATTENDED.values(), ids=ATTENDED)
def test_packed_rows_are_attended_as_listed_rows(
    layer_id: int,
    slots: Sequence[int],
    starts: Sequence[int],
    length: int,
    drafts: int,
    splits: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tile = packed_attention.LIST_TILE
    monkeypatch.setattr(packed_attention, "LIST_TILE", replace(tile, entries=min(16, tile.entries)))
    given = Attended(layer_id, slots, starts, length, drafts)
    compressed = given.compressed()
    found = packed_attention.packed_attention(
        given.runtime, layer_id, given.batch, given.q, given.sink, given.call_rows, splits
    )
    expected = given.expected(compressed)
    # The order of the list differs: fp32 sums, and probabilities rounded against another maximum, half a bf16 ulp each.
    assert torch.allclose(found.float(), expected.float(), rtol=2.0**-7, atol=2.0**-7 * float(expected.abs().max()))
    assert found.any()
