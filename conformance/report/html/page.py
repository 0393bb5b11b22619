"""Rendering templates: escaping, and how numbers, bits and texts of ports are written."""

from __future__ import annotations

import math
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

import jinja2

LONGEST_NAME, LONGEST_TEXT = 200, 1500


def render(template: str, **context: Any) -> str:
    """A page from a template of `templates/`; everything in `context` is escaped where it is put in."""
    style = resources.files(__package__).joinpath("templates/style.css").read_text(encoding="utf-8")
    return _environment().get_template(template).render(style=style, **context)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(str(__package__)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "short": short_number,
        "count": lambda value: f"{value:,}",
        "cases": lambda value: "1 case" if value == 1 else f"{value:,} cases",
        "seconds": seconds,
        "compact": compact,
        "bin": bin_label,
        "name": lambda text: clipped(text, LONGEST_NAME),
        "said": lambda text: clipped(text, LONGEST_TEXT),
        "binary": binary,
        "web_address": web_address,
    }
    return environment


def clipped(text: str, longest: int) -> str:
    """A text of a port on one line, without control characters, and not longer than a page can bear."""
    shown = "".join(
        character if character.isprintable() else " " if character.isspace() else ascii(character)[1:-1]
        for character in text
    )
    return shown if len(shown) <= longest else f"{shown[:longest]}… ({len(shown):,} characters)"


def number(value: float) -> str:
    """Three digits; a ratio just above one must not look like the largest one that passes."""
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "−∞"}.get(value, "NaN")
    text = f"{value:.3g}"
    return ">1" if text == "1" and value > 1 else text


def short_number(value: float) -> str:
    """For a cell of a heat map: at most four characters."""
    if not math.isfinite(value) or value == 0:
        return "∞" if value == math.inf else f"{value:.0f}" if value == 0 else "NaN"
    if value >= 100:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    if value > 1:
        return ">1" if value < 1.05 else f"{value:.2g}"
    if value > 0.995:
        return "1" if value == 1 else ".99"
    return f"{value:.2f}".removeprefix("0") if value >= 0.005 else "~0"


def compact(count: int) -> str:
    """A count in at most four characters."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if count >= size:
            return f"{count / size:.1f}{unit}" if count < 10 * size else f"{count // size}{unit}"
    return str(count)


def bin_label(edge: str) -> str:
    """The upper end of a histogram's bin: a whole number or one over one."""
    value = float(edge)
    return "∞" if math.isinf(value) else f"1/{1 / value:.0f}" if 0 < value < 1 else f"{value:.0f}"


def seconds(value: float) -> str:
    """A time, to the digits that mean something."""
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    return f"{value / 60:.0f} min {value % 60:.0f} s"


def binary(bits: str, other: str) -> list[tuple[str, bool]]:
    """A hexadecimal pattern as runs of binary digits, each with whether it differs from the other pattern."""
    if not bits or len(bits) != len(other):
        return []
    width = 4 * (len(bits) - 2)
    own, others = (f"{int(text, 16):0{width}b}" for text in (bits, other))
    runs: list[tuple[str, bool]] = []
    for place, (digit, counterpart) in enumerate(zip(own, others, strict=True)):
        gap = " " if place and place % 4 == 0 else ""
        differs = digit != counterpart
        if runs and runs[-1][1] == differs:
            runs[-1] = (runs[-1][0] + gap + digit, differs)
        else:
            runs.append((gap + digit, differs))
    return runs


def web_address(text: str) -> bool:
    """Whether a text may become a link: nothing but http and https, since `javascript:` is an address too."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)
