"""Mistakes in the window's rows, its ring and its lists (numerics.md 6, items 2 and 3)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

W = "window"
ROWS = "window.window_rows"
LIST = "window.window_indices"
RING = "window.window_update"
ROTATED = "rotate(config, layer_id, kv, positions, compute=compute)"

FAULTS: tuple[Fault, ...] = (
    Fault(
        W,
        "rows-not-quantised",
        "window-not-quantised",
        "Rows are kept in bf16.",
        Edit(ROWS, f"fake_quantize_fp8({ROTATED})", ROTATED),
    ),
    Fault(
        W,
        "rows-quantised-before-rotation",
        "quantised-before-rotation",
        "Rows are quantised, then rotated.",
        Edit(
            ROWS,
            f"fake_quantize_fp8({ROTATED})",
            "rotate(config, layer_id, fake_quantize_fp8(kv), positions, compute=compute)",
        ),
    ),
    Fault(
        W,
        "rotary-part-not-quantised",
        "rotary-part-not-quantised",
        "The rotary part is kept in bf16.",
        Edit(
            ROWS,
            f"return fake_quantize_fp8({ROTATED})",
            f"kv = {ROTATED}\n    still = kv.shape[-1] - config.rope_head_dim\n"
            "    return torch.cat((fake_quantize_fp8(kv)[..., :still], kv[..., still:]), dim=-1)",
        ),
    ),
    Fault(
        W,
        "rows-not-normed",
        "window-norm",
        "The row's norm is missing.",
        Edit(ROWS, 'kv = rms_norm(kv, weights["kv_norm.weight"], config.norm_eps, compute=compute)', "pass"),
    ),
    Fault(
        W,
        "rows-not-rotated",
        "window-rotation",
        "Keys are not rotated.",
        Edit(ROWS, ROTATED, "kv"),
    ),
    Fault(
        W,
        "prefill-one-too-many",
        "window-one-too-wide",
        "A prompt's queries see W positions before themselves.",
        Edit(
            LIST,
            "(newest - window + 1).clamp(min=0) + torch.arange(min(length, window))",
            "(newest - window).clamp(min=0) + torch.arange(min(length, window + 1))",
        ),
    ),
    Fault(
        W,
        "prefill-one-too-few",
        "window-one-too-narrow",
        "A prompt's queries see W - 2 positions before themselves.",
        Edit(LIST, "(newest - window + 1).clamp(min=0)", "(newest - window + 2).clamp(min=0)"),
    ),
    Fault(
        W,
        "prefill-unlimited",
        "window-not-applied",
        "A prompt's queries see every position before themselves.",
        Edit(
            LIST,
            "(newest - window + 1).clamp(min=0) + torch.arange(min(length, window))",
            "0 * newest + torch.arange(length)",
        ),
    ),
    Fault(
        W,
        "prefill-not-causal",
        "window-not-causal",
        "Queries near the start see positions after themselves.",
        Edit(LIST, "listed.masked_fill(listed > newest, -1)", "listed"),
    ),
    Fault(
        W,
        "prefill-padded-with-zero",
        "padding-not-minus-one",
        "Unused entries name row 0 instead of none.",
        Edit(LIST, "listed.masked_fill(listed > newest, -1)", "listed.masked_fill(listed > newest, 0)"),
    ),
    Fault(
        W,
        "decode-one-too-few",
        "window-one-too-narrow",
        "The oldest slot of a full ring is not read.",
        Edit(
            LIST,
            "slots.masked_fill(listed < 0, -1)",
            "slots.masked_fill((listed < 0) | (listed == newest - window + 1), -1)",
        ),
    ),
    Fault(
        W,
        "decode-own-row-missing",
        "window-one-too-narrow",
        "The step's own position is not listed.",
        Edit(LIST, "slots.masked_fill(listed < 0, -1)", "slots.masked_fill((listed < 0) | (listed == newest), -1)"),
    ),
    Fault(
        W,
        "decode-unwritten-slots",
        "unwritten-slots-listed",
        "Slots that were never written are read.",
        Edit(LIST, "slots.masked_fill(listed < 0, -1)", "slots"),
    ),
    Fault(
        W,
        "slot-off-by-one",
        "ring-slot-off",
        "Position p lives in slot (p + 1) mod W.",
        Edit(
            RING,
            "torch.as_tensor(start_pos).reshape(-1, 1) + kept",
            "torch.as_tensor(start_pos).reshape(-1, 1) + kept + 1",
        ),
    ),
    Fault(
        W,
        "slots-from-zero",
        "ring-chunk-at-slot-0",
        "The rows kept of a long prompt fill the ring from slot 0.",
        Edit(
            RING,
            "torch.as_tensor(start_pos).reshape(-1, 1) + kept",
            "torch.as_tensor(start_pos).reshape(-1, 1) + kept - kept[0]",
        ),
    ),
    Fault(
        W,
        "start-position-ignored",
        "ring-chunk-at-slot-0",
        "Every call writes from slot 0.",
        Edit(
            RING,
            "torch.as_tensor(start_pos).reshape(-1, 1) + kept",
            "0 * torch.as_tensor(start_pos).reshape(-1, 1) + kept",
        ),
    ),
    Fault(
        W,
        "oldest-rows-kept",
        "ring-keeps-oldest",
        "A long prompt leaves its first W rows in the ring.",
        Edit(
            RING,
            "torch.arange(max(0, length - config.window_size), length)",
            "torch.arange(min(length, config.window_size))",
        ),
    ),
    Fault(
        W,
        "ring-one-short",
        "ring-slot-off",
        "The ring wraps one slot early.",
        Edit(RING, "% config.window_size", "% max(1, config.window_size - 1)"),
    ),
    Fault(
        W,
        "ring-read-before-write",
        "ring-read-before-write",
        "A step attends to the ring as it was before its row.",
        Edit("window.window_context", "return ring_after", "return ring_before"),
    ),
    Fault(
        W,
        "ring-of-first-request",
        "requests-mixed",
        "All requests write to the first one's ring.",
        Edit(
            RING,
            "ring[torch.arange(ring.shape[0]).unsqueeze(1), slots] = rows[:, kept]",
            "ring[torch.zeros(ring.shape[0], 1, dtype=torch.int64), slots] = rows[:, kept]",
        ),
    ),
)
