"""The fault catalogue: one module a component, every fault one edit of the reference."""

from __future__ import annotations

from conformance.faults.catalogue import (
    attention,
    block,
    candidates,
    compressor,
    dspark,
    dspark_ends,
    engram,
    experts,
    gate,
    hyper_connections,
    images,
    indexer,
    linear,
    model,
    norm,
    quantize,
    roll_back,
    rotary,
    sampling,
    serving,
    sparse_attention,
    vision,
    window,
)
from conformance.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *quantize.FAULTS,
    *linear.FAULTS,
    *norm.FAULTS,
    *rotary.FAULTS,
    *hyper_connections.FAULTS,
    *window.FAULTS,
    *compressor.FAULTS,
    *indexer.FAULTS,
    *candidates.FAULTS,
    *sparse_attention.FAULTS,
    *attention.FAULTS,
    *gate.FAULTS,
    *experts.FAULTS,
    *engram.FAULTS,
    *block.FAULTS,
    *model.FAULTS,
    *dspark.FAULTS,
    *dspark_ends.FAULTS,
    *roll_back.FAULTS,
    *vision.FAULTS,
    *images.FAULTS,
    *serving.FAULTS,
    *sampling.FAULTS,
)
"""All faults, by component in the order of reports."""
