"""Whether a kernel is slower than it was: a decision on samples, not on a clock."""

from __future__ import annotations

import re
from dataclasses import dataclass

from conformance.bench.results import Times
from conformance.bench.units import seconds
from conformance.errors import ConformanceError
from conformance.tensors import one_line


def parse_allowed(text: str) -> float:
    """A share from a text such as "10%".

    Raises:
        ConformanceError: it is none.
    """
    found = re.fullmatch(r"(\d{1,4}(?:\.\d{1,3})?)%", text)
    if found is None:
        raise ConformanceError(f"--fail-if-slower {one_line(text)}: expected a percentage, such as 10%")
    return float(found[1]) / 100


@dataclass(frozen=True)
class Change:
    """`slower` says that it is, `remark` what else there is to say; both empty where all is well."""

    slower: str = ""
    remark: str = ""


def change(now: Times, then: Times, allowed: float) -> Change:
    """Whether `now` is slower than `then` by more than the share `allowed`.

    The medians and the fastest samples must both be so far apart: what else runs on a machine delays some samples, and
    a slower kernel delays all.
    """
    ratio = now.median / then.median
    if ratio <= 1 + allowed:
        return Change()
    words = f"{seconds(now.median)}, {100 * (ratio - 1):.1f} % slower than the stored {seconds(then.median)}"
    if now.fastest / then.fastest > 1 + allowed:
        return Change(slower=f"{words}; {100 * allowed:g} % are allowed")
    fastest = f"the fastest samples are {seconds(now.fastest)} and {seconds(then.fastest)}"
    return Change(remark=f"{words}, but {fastest}: the machine is unsteady")
