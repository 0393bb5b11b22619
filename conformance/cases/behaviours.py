"""What a scenario exercises, in the words that case ids use; derived from its calls, not from its name."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.cases.traces import Trace


def behaviour(trace: Trace) -> str:
    """The situation of a whole scenario."""
    window = trace.model.config.window_size
    prompt, steps = trace.lengths[0], len(trace.lengths) - 1
    if trace.image_mask is not None:
        return "image-inside-prompt"
    if trace.batch > 1:
        return f"batch-of-{trace.batch}"
    if not steps:
        if prompt == 1:
            return "prefill-single-token"
        if prompt < window:
            return "prefill-shorter-than-window" if prompt == window - 1 else f"prefill-{prompt}-tokens"
        if prompt == window:
            return "prefill-equal-to-window"
        return "prefill-one-more-than-window" if prompt == window + 1 else "prefill-several-windows"
    if prompt == 1:
        return "decode-from-first-token"
    if trace.total <= window:
        return "decode-before-wrap"
    if prompt < window:
        return "decode-across-wrap" if trace.total > 2 * window else "decode-into-wrap"
    return "decode-after-wrap"


def named(traces: Sequence[Trace]) -> dict[str, Trace]:
    """Traces by behaviour; where several share one, their names are added."""
    names = [behaviour(trace) for trace in traces]
    return {
        name if names.count(name) == 1 else f"{name}-{trace.name}": trace
        for name, trace in zip(names, traces, strict=True)
    }
