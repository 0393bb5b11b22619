"""Honest variants of the reference: right, but different where the specification leaves freedom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.faults.patches import patched


@dataclass(frozen=True)
class HonestVariant:
    """One variant: how the reference is made, and what is changed in it."""

    name: str
    why: str
    """Why a conforming implementation may do this."""
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def session(self) -> Iterator[InProcess]:
        """A session with the variant; the change lasts as long as the context."""
        with patched(self.changes):
            yield InProcess(Reference(**self.options))


HONEST_VARIANTS: tuple[HonestVariant, ...] = (
    HonestVariant("float32", "The reference itself: another summation order than the recording's kernels."),
    HonestVariant(
        "float64",
        "More precision than required between the same rounding points.",
        options={"compute": torch.float64},
    ),
    HonestVariant(
        "ties-earliest",
        "Ties of a top-k may go to the earliest position.",
        options={"ties": "earliest"},
    ),
    HonestVariant(
        "list-blocks-of-16",
        "The running maximum of the attention may advance in blocks of any size.",
        changes={"reference.sparse_attention.LIST_BLOCK": 16},
    ),
    HonestVariant(
        "final-maximum",
        "Probabilities may be rounded relative to the final maximum.",
        changes={"reference.sparse_attention.LIST_BLOCK": 1 << 20},
    ),
)
