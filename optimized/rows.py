"""How a cached row lies in memory: its codes, then its scales, packed as deployed (numerics.md 6.3).

| row        | quantiser                     | bytes at the released widths |
|------------|-------------------------------|------------------------------|
| window     | Q8, the whole row             | 512 codes + 16 E8M0          |
| compressed | Q4-E4M3, the whole row        | 256 pairs + 32 E4M3          |
| index key  | Q4-E8M0, the whole key        | 64 pairs + 4 E8M0            |

The rotary features are quantised with the rest of the row, in every kind (numerics.md 2).
"""

from __future__ import annotations

from optimized.device import INTERPRETED

# ruff: isort: split
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from optimized.checks import require_bf16, require_shape, require_state
from optimized.codecs import decode_e4m3, decode_e8m0, encode_e2m1, encode_e4m3, pack_pairs, unpack_pairs
from optimized.config import Config
from optimized.quantize import scale_groups

ROWS_PER_PROGRAM = 64 if INTERPRETED else 4

GROUPS = {"fp8": 32, "fp4_e8m0": 32, "fp4_e4m3": 16}
"""Features that share a scale, by quantiser."""


@dataclass(frozen=True)
class RowFormat:
    """A quantised row of `width` features."""

    form: str
    """The quantiser: "fp8", "fp4_e8m0" or "fp4_e4m3"."""
    width: int

    @property
    def group(self) -> int:
        """Features that share a scale."""
        return GROUPS[self.form]

    @property
    def code_bytes(self) -> int:
        """Bytes of codes, which is also where the scales begin."""
        return self.width if self.form == "fp8" else self.width // 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales, one a group; the last group may be short."""
        return -(-self.width // self.group)

    @property
    def bytes(self) -> int:
        """Bytes of a row."""
        return self.code_bytes + self.scale_bytes


def window_format(config: Config) -> RowFormat:
    """A row of the sliding window."""
    return RowFormat("fp8", config.head_dim)


def compressed_format(config: Config) -> RowFormat:
    """A compressed row."""
    return RowFormat("fp4_e4m3", config.head_dim)


def index_key_format(config: Config) -> RowFormat:
    """An index key."""
    return RowFormat("fp4_e8m0", config.index_head_dim)


@triton.jit
def load_rows(
    rows,
    place,
    valid,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Packed rows number `place` [ROWS] behind `rows`, dequantised: bf16 [ROWS, PADDED], zero where not `valid`."""
    ROWS: tl.constexpr = place.shape[0]
    CODE_BYTES: tl.constexpr = WIDTH if FORMAT == "fp8" else WIDTH // 2
    SCALE_BYTES: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    first = (place * (CODE_BYTES + SCALE_BYTES))[:, None]
    if FORMAT == "fp8":
        feature = tl.arange(0, PADDED)
        inside = valid[:, None] & (feature < CODE_BYTES)[None, :]
        values = decode_e4m3(tl.load(rows + first + feature[None, :], mask=inside, other=0))
    else:
        pair = tl.arange(0, PADDED // 2)
        inside = valid[:, None] & (pair < CODE_BYTES)[None, :]
        values = unpack_pairs(tl.load(rows + first + pair[None, :], mask=inside, other=0))
    group = tl.arange(0, PADDED // GROUP)
    inside = valid[:, None] & (group < SCALE_BYTES)[None, :]
    code = tl.load(rows + first + CODE_BYTES + group[None, :], mask=inside, other=0)
    if FORMAT == "fp4_e4m3":
        scale = decode_e4m3(code)
    else:
        scale = decode_e8m0(code)
    scaled = tl.reshape(values, (ROWS, PADDED // GROUP, GROUP)) * scale[:, :, None]
    return tl.reshape(scaled, (ROWS, PADDED)).to(tl.bfloat16)


@triton.jit
def _unpack_kernel(
    rows,
    out,
    count,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    feature = tl.arange(0, PADDED)
    values = load_rows(rows, place, place < count, FORMAT, GROUP, WIDTH, PADDED)
    inside = (place < count)[:, None] & (feature < WIDTH)[None, :]
    tl.store(out + place[:, None] * WIDTH + feature[None, :], values, mask=inside)


@triton.jit
def _write_kernel(
    x,
    norm_weight,
    cos,
    sin,
    slots,
    start,
    out,
    requests,
    rows_of_request,
    length,
    ring,
    eps,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TURNING: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Norm, turn, quantise and pack rows, each into its place in the ring of its slot.

    Row j of a request stands for the group ⌊start / RATIO⌋ + j of its tokens, and turns by the position of the group's
    first token.
    """
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = place // rows_of_request
    present = request < requests
    first = tl.load(start + request, mask=present, other=0)
    group = first // RATIO + place % rows_of_request
    complete = (first + length) // RATIO
    # Of more rows than the ring holds the last remain.
    present = present & (group < complete) & (group >= complete - ring)

    feature = tl.arange(0, PADDED)
    inside = present[:, None] & (feature < WIDTH)[None, :]
    turns = (feature >= WIDTH - TURNING) & (feature < WIDTH)
    partner = tl.where(turns, feature ^ 1, feature)
    own_place = place.to(tl.int64)[:, None] * WIDTH
    values = tl.load(x + own_place + feature[None, :], mask=inside, other=0.0).to(tl.float32)
    others = tl.load(x + own_place + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(values * values, axis=1) / WIDTH
        factor = tl.rsqrt(mean + eps)[:, None]
        weight = tl.load(norm_weight + feature, mask=feature < WIDTH, other=0.0).to(tl.float32)
        other_weight = tl.load(norm_weight + partner, mask=feature < WIDTH, other=0.0).to(tl.float32)
        values = (values * factor * weight[None, :]).to(tl.bfloat16).to(tl.float32)
        others = (others * factor * other_weight[None, :]).to(tl.bfloat16).to(tl.float32)
    table = (group * RATIO)[:, None] * (TURNING // 2) + ((feature - (WIDTH - TURNING)) // 2)[None, :]
    turning = inside & turns[None, :]
    cosine = tl.load(cos + table, mask=turning, other=1.0)
    sine = tl.load(sin + table, mask=turning, other=0.0)
    # (left + i·right) · (cos + i·sin), written for one feature and its partner.
    signed = tl.where(((feature & 1) == 0)[None, :], -sine, sine)
    turned = tl.where(turns[None, :], values * cosine + others * signed, values).to(tl.bfloat16).to(tl.float32)

    scaled, scale_code, _ = scale_groups(tl.reshape(turned, (ROWS * PADDED // GROUP, GROUP)), FORMAT)
    slot = tl.load(slots + request, mask=present, other=0)
    CODE_BYTES: tl.constexpr = WIDTH if FORMAT == "fp8" else WIDTH // 2
    SCALE_BYTES: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    target = out + ((slot * ring + group % ring) * (CODE_BYTES + SCALE_BYTES))[:, None]
    if FORMAT == "fp8":
        tl.store(target + feature[None, :], tl.reshape(encode_e4m3(scaled), (ROWS, PADDED)), mask=inside)
    else:
        pair = tl.arange(0, PADDED // 2)
        packed = tl.reshape(pack_pairs(encode_e2m1(scaled), ROWS * PADDED // GROUP, GROUP // 2), (ROWS, PADDED // 2))
        tl.store(target + pair[None, :], packed, mask=present[:, None] & (pair < CODE_BYTES)[None, :])
    scale = tl.arange(0, PADDED // GROUP)
    codes = tl.reshape(scale_code.to(tl.uint8), (ROWS, PADDED // GROUP))
    tl.store(target + CODE_BYTES + scale[None, :], codes, mask=present[:, None] & (scale < SCALE_BYTES)[None, :])


def write_rows(
    form: RowFormat,
    x: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    start: torch.Tensor,
    length: int,
    ratio: int,
    out: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None = None,
) -> None:
    """Norm, turn, quantise and pack the rows that a call completes, into the rings of its requests (numerics.md 6).

    bf16 x [B,n,width], row j of a request for the group ⌊start / ratio⌋ + j of its tokens (n = ⌈length / ratio⌉; those
    that are not complete after the call are left out); fp32 tables [positions, R/2], two, by absolute position; int64
    slots and start [B], `length` tokens of each request -> uint8 out [slots, ring, bytes], in place: group g at g
    modulo the ring, and of more groups than that the last.  `norm` is an RMSNorm before: weight [width] and eps.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that do not belong together, or `out` is not contiguous.
    """
    x = require_bf16("x", x)
    if x.dim() != 3 or x.shape[-1] != form.width:
        raise ValueError(f"x: expected [B, n, {form.width}], got {list(x.shape)}")
    requests, rows, width = x.shape
    cos, sin = tables
    turning = 2 * cos.shape[-1]
    if cos.dim() != 2 or cos.shape != sin.shape or turning > width or width % 2:
        raise ValueError(f"tables: {list(cos.shape)} and {list(sin.shape)} do not go with rows of {width}")
    slots, start = require_shape("slots", slots, requests), require_shape("start", start, requests)
    out = require_state("out", out, torch.uint8, form.bytes)
    if not x.numel():
        return
    _write_kernel[(triton.cdiv(requests * rows, ROWS_PER_PROGRAM),)](
        x,
        x if norm is None else require_shape("norm", norm[0], width),
        cos,
        sin,
        slots,
        start,
        out,
        requests,
        rows,
        length,
        out.shape[1],
        0.0 if norm is None else norm[1],
        RATIO=ratio,
        WIDTH=width,
        PADDED=max(form.group, triton.next_power_of_2(width)),
        TURNING=turning,
        FORMAT=form.form,
        GROUP=form.group,
        NORM=norm is not None,
        ROWS=ROWS_PER_PROGRAM,
    )


def unpack_rows(form: RowFormat, rows: torch.Tensor) -> torch.Tensor:
    """What packed rows stand for: uint8 [slots, n, bytes] -> bf16 [slots, n, width] (numerics.md 2)."""
    rows = require_state("rows", rows, torch.uint8, form.bytes)
    out = torch.empty(*rows.shape[:-1], form.width, dtype=torch.bfloat16, device=rows.device)
    count = rows.shape[:-1].numel()
    _unpack_kernel[(triton.cdiv(count, ROWS_PER_PROGRAM),)](
        rows,
        out,
        count,
        FORMAT=form.form,
        GROUP=form.group,
        WIDTH=form.width,
        PADDED=max(form.group, triton.next_power_of_2(form.width)),
        ROWS=ROWS_PER_PROGRAM,
    )
    return out
