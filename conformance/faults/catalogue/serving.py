"""What goes wrong when requests are cut into chunks, share a batch, follow one another, or are resumed (10.2)."""

from __future__ import annotations

from typing import Any

import torch

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit, Replace
from reference import saving

A, B, C = "attention", "block", "compressor"
INDICES = "window.window_indices"
EXTEND = "engram.LookBack.extend"


def _shared_with_the_running_one(part: Any) -> dict[str, Any]:
    """A saved state that follows the object it was taken of, as one does that holds its buffers and not copies."""
    saved = {
        name: value for name, value in vars(part).items() if isinstance(value, (torch.Tensor, dict, *saving.PARTS))
    }
    for name, value in saved.items():
        if isinstance(value, saving.PARTS):
            saved[name] = _shared_with_the_running_one(value)
        elif isinstance(value, dict):
            saved[name] = {key: _shared_with_the_running_one(entry) for key, entry in value.items()}
    followed = [name for name, value in saved.items() if isinstance(value, torch.Tensor)]
    before = getattr(part, "step", None) or part.extend

    def followed_step(*arguments: Any, **named: Any) -> Any:
        results = before(*arguments, **named)
        saved.update({name: getattr(part, name) for name in followed})
        return results

    setattr(part, "step" if hasattr(part, "step") else "extend", followed_step)
    return saved


FAULTS: tuple[Fault, ...] = (
    Fault(
        A,
        "chunk-reads-ring-alone",
        "chunk-own-rows-unseen",
        "Tokens of a chunk attend to the ring as it was before the chunk, and not to one another.",
        Edit(
            INDICES,
            "torch.where(listed < start_pos, slots, window + listed - start_pos)",
            "torch.where(listed < start_pos, slots, -1)",
        ),
    ),
    Fault(
        A,
        "chunk-reads-ring-after-it",
        "chunk-not-causal",
        "A chunk is written into the ring before its tokens read: later ones have overwritten what earlier ones need.",
        Edit("attention.Attention._context", "ring_before[request]", "self.window[request]"),
    ),
    Fault(
        A,
        "chunk-sees-its-end",
        "chunk-not-causal",
        "Every token of a chunk sees the compressed positions that its last token sees.",
        Edit(
            "attention.Attention._select",
            "own = (queries[one], head_weights[one], keys[one, :count], positions[one], mask)",
            "seen = torch.full_like(positions[one], int(positions[request, -1])) if int(positions[request, 0]) else "
            "positions[one]\n        own = (queries[one], head_weights[one], keys[one, :count], seen, mask)",
        ),
    ),
    Fault(
        A,
        "chunk-positions-from-zero",
        "chunk-position-restarts",
        "The positions of every chunk begin at 0.",
        Edit(
            "attention.Attention.step",
            "start_pos.unsqueeze(1) + torch.arange",
            "(start_pos.unsqueeze(1) if x.shape[1] == 1 else 0 * start_pos.unsqueeze(1)) + torch.arange",
        ),
    ),
    Fault(
        C,
        "chunk-begins-a-group",
        "chunk-mid-group",
        "A chunk begins with a fresh carry: the token that waited is lost.",
        Edit(
            "compressor.Compressor._pool",
            "fresh = (start_pos == 0)[:, None, None]",
            "fresh = ((start_pos == 0) | (length > 1))[:, None, None]",
        ),
    ),
    Fault(
        A,
        "ring-slots-of-first-request",
        "position-of-first-request",
        "All requests of a batch write to the slots of the first.",
        Edit(
            "window.window_update",
            "torch.as_tensor(start_pos).reshape(-1, 1)",
            "torch.as_tensor(start_pos).reshape(-1, 1)[:1]",
        ),
    ),
    Fault(
        A,
        "state-of-first-request",
        "requests-mixed",
        "All requests of a batch read the ring of the first.",
        Edit(
            "attention.Attention._context",
            "self.window[request], rows[request]",
            "self.window[0], rows[request]",
        ),
    ),
    Fault(
        A,
        "one-ring-a-layer",
        "state-shared-by-requests",
        "The ring belongs to the layer's code and not to the request: requests in turn write to the same.",
        Edit(
            "attention.Attention.step",
            "self.window = window_update(config, ring_before, rows, start_pos)",
            'key = ("ring", layer_id, *self.window.shape)\n'
            "    if x.shape[1] == 1 and key in arithmetic.GLOBAL and bool((start_pos > 0).all()):\n"
            "        ring_before = arithmetic.GLOBAL[key]\n"
            "    self.window = arithmetic.GLOBAL[key] = window_update(config, ring_before, rows, start_pos)",
        ),
    ),
    Fault(
        B,
        "look-back-into-request-before",
        "look-back-survives-request",
        "The first tokens of a request look back to the last ones of the request that had its row.",
        Edit(EXTEND, "self.barrier | (start_pos == 0).unsqueeze(1)", "self.barrier"),
    ),
    Fault(
        B,
        "images-of-request-before",
        "image-remembered",
        "Without a mask of its own, a request stops its look-back where the one before had its image.",
        Edit(
            EXTEND,
            "    length = input_ids.shape[1]\n",
            "    length = input_ids.shape[1]\n    barrier = barrier.clone()\n"
            "    images = getattr(self, 'images', None)\n"
            "    self.images = images if image_mask is None else image_mask\n"
            "    if image_mask is None and images is not None:\n"
            "        barrier[:, -min(length, images.shape[1]) :] |= images[:, : min(length, images.shape[1])]\n",
        ),
    ),
    Fault(
        A,
        "saved-state-follows",
        "saved-state-shared",
        "A saved state is the request's own buffers: what comes later is written into it.",
        Replace("saving.save", _shared_with_the_running_one),
    ),
    Fault(
        A,
        "carry-not-saved",
        "saved-state-incomplete",
        "The token of an unfinished group is not part of the saved state.",
        Edit("saving.save", "isinstance(value, PARTS):", "isinstance(value, PARTS) and name != 'compressor':"),
    ),
    Fault(
        A,
        "ring-not-saved",
        "saved-state-incomplete",
        "Only compressed rows are saved; the ring is what it was when the state is restored.",
        Edit(
            "saving.save", "isinstance(value, torch.Tensor):", "isinstance(value, torch.Tensor) and name != 'window':"
        ),
    ),
    Fault(
        B,
        "look-back-not-saved",
        "saved-state-incomplete",
        "The tokens that Engram looks back to are not part of the saved state.",
        Edit("saving.save", "isinstance(value, PARTS):", "isinstance(value, PARTS) and name != 'look_back':"),
    ),
)
