"""The sliding window: its rows, the ring that keeps them, and what queries read of it (numerics.md 6, items 2–3)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from reference.config import Config
from reference.linear import linear_fp8
from reference.norm import rms_norm
from reference.parameters import Weights
from reference.quantize import fake_quantize_fp8
from reference.rotary import rotate


def window_rows(
    config: Config,
    layer_id: int,
    weights: Weights,
    x: torch.Tensor,
    positions: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Key (= value) rows of the window: bf16 x [B,T,D], int64 [B,T] -> bf16 [B,T,d] (numerics.md 6, item 2).

    Normed, rotated, then fake-quantised over the whole vector, rotary part included.
    """
    kv = linear_fp8(x, weights["wkv.weight"], weights["wkv.scale"], compute=compute)
    kv = rms_norm(kv, weights["kv_norm.weight"], config.norm_eps, compute=compute)
    return fake_quantize_fp8(rotate(config, layer_id, kv, positions, compute=compute))


def window_indices(config: Config, start_pos: int, length: int) -> torch.Tensor:
    """Rows that each query of one request reads, -1 for none: int32 [length, n] (numerics.md 6, item 3).

    The order fixes the 64-wide blocks of the sparse attention and so the last bits.

    - Prefill (`start_pos` = 0) indexes this call's rows: ascending positions, then -1, n = min(length, W).
    - A decode step (`length` = 1) indexes the slots of the ring from oldest to newest, n = W; while the ring fills,
      the missing ones come first.
    - A longer call that continues a request keeps the order of decode steps and indexes the W slots of the ring as it
      was before the call, followed by this call's rows (shifted by W).
    """
    window = config.window_size
    newest = torch.arange(start_pos, start_pos + length).unsqueeze(1)
    if start_pos == 0:
        listed = (newest - window + 1).clamp(min=0) + torch.arange(min(length, window))
        return listed.masked_fill(listed > newest, -1).to(torch.int32)
    listed = newest - window + 1 + torch.arange(window)
    slots = listed % window
    if length > 1:
        slots = torch.where(listed < start_pos, slots, window + listed - start_pos)
    return slots.masked_fill(listed < 0, -1).to(torch.int32)


def window_update(
    config: Config, ring: torch.Tensor, rows: torch.Tensor, start_pos: int | torch.Tensor
) -> torch.Tensor:
    """The ring after a call: bf16 ring [B,W,d], rows [B,T,d] of positions start_pos … -> bf16 [B,W,d].

    Position p lives in slot p mod W; only the last W rows of a call survive it (numerics.md 6, item 3).
    `start_pos` is one position for all requests or int64 [B].
    """
    length = rows.shape[1]
    kept = torch.arange(max(0, length - config.window_size), length)
    slots = (torch.as_tensor(start_pos).reshape(-1, 1) + kept) % config.window_size
    ring = ring.clone()
    ring[torch.arange(ring.shape[0]).unsqueeze(1), slots] = rows[:, kept]
    return ring


class RingCall(NamedTuple):
    """What a ring can be made anew from: int64 start_pos [B], the ring [B,W,d] before a call and its rows [B,T,d]."""

    start_pos: torch.Tensor
    ring_before: torch.Tensor
    rows: torch.Tensor


def rolled_back_ring(config: Config, call: RingCall | None, end: torch.Tensor) -> torch.Tensor:
    """The ring as if the last call had ended before position `end`: int64 [B] -> bf16 [B,W,d] (numerics.md 10.1).

    A ValueError says that there was no call, or that `end` is not in it.
    """
    if call is None:
        raise ValueError("there is no call to take tokens back from")
    lengths = (end - call.start_pos).tolist()
    if not all(0 <= length <= call.rows.shape[1] for length in lengths):
        raise ValueError(f"positions from {end.tolist()} on are not all of the last call, {call.start_pos.tolist()}")
    rings = []
    for request, (start, length) in enumerate(zip(call.start_pos.tolist(), lengths, strict=True)):
        one = slice(request, request + 1)
        rings.append(window_update(config, call.ring_before[one], call.rows[one, :length], start))
    return torch.cat(rings)


def window_context(
    config: Config, ring_before: torch.Tensor, ring_after: torch.Tensor, rows: torch.Tensor, start_pos: int
) -> torch.Tensor:
    """The rows that `window_indices` indexes, for one request: [W,d], [W,d], [T,d] -> [N,d] (numerics.md 6, item 3)."""
    if start_pos == 0:
        return rows
    if rows.shape[0] == 1:
        return ring_after
    return torch.cat((ring_before, rows))
