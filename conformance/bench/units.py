"""How times, amounts and rates are written."""

from __future__ import annotations

FACTORS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def scaled(value: float, unit: str) -> str:
    """An amount or a rate with the prefix that suits it."""
    factor, prefix = next((pair for pair in FACTORS if value >= pair[0]), FACTORS[-1])
    return f"{value / factor:.3g} {prefix}{unit}"


def seconds(value: float) -> str:
    """A time in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value / size < 1000 else f"{value / size:.0f} {unit}"
    return f"{value * 1e9:.3g} ns"
