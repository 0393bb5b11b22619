"""The state of a request kept aside: to resume it later, or to begin several from one prefix (numerics.md 10.2)."""

from __future__ import annotations

from typing import Any

import torch

from reference.attention import Attention
from reference.block import Block
from reference.compressor import Compressor
from reference.dspark import DraftAttention, DraftBlock, DSpark
from reference.engram import LookBack
from reference.model import Model
from reference.stack import Stack

PARTS = (Attention, Compressor, LookBack, Block, Stack, Model, DraftAttention, DraftBlock, DSpark)
"""What holds state, or other parts that do."""


def save(part: Any) -> dict[str, Any]:
    """A copy of every tensor that `part` and the parts in it keep, by attribute.

    The slots of the runtime are not state of a request: every call publishes them anew before they are read.  Nor is
    what a roll-back of the last call would need: a state is saved after what is rejected has been taken back.
    """
    saved: dict[str, Any] = {}
    for name, value in vars(part).items():
        if isinstance(value, torch.Tensor):
            saved[name] = value.clone()
        elif isinstance(value, PARTS):
            saved[name] = save(value)
        elif isinstance(value, dict):
            saved[name] = {key: save(entry) for key, entry in value.items() if isinstance(entry, PARTS)}
    return saved


def restore(part: Any, saved: dict[str, Any]) -> None:
    """Put `part` into a state that was saved of it, or of another one made from the same arguments.

    A ValueError says that the state is one of another kind of part or of another batch size.
    """
    for name, value in saved.items():
        held = getattr(part, name, None)
        if isinstance(value, torch.Tensor):
            if not isinstance(held, torch.Tensor) or held.shape[:1] != value.shape[:1]:
                raise ValueError(f"{name} of the saved state does not belong to this {type(part).__name__}")
            setattr(part, name, value.clone())
        elif isinstance(held, PARTS):
            restore(held, value)
        elif isinstance(held, dict) and held.keys() >= value.keys():
            for key, entry in value.items():
                restore(held[key], entry)
        else:
            raise ValueError(f"{name} of the saved state does not belong to this {type(part).__name__}")
