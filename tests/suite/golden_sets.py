"""Complete golden sets for any configuration, for the tests of this folder."""

from __future__ import annotations

from conformance.faults.synthetic import Run, make_golden_sets, make_weights, record

__all__ = ["Run", "make_golden_sets", "make_weights", "record"]
