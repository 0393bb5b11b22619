"""What `conformance coverage` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from conformance.coverage import FileCoverage, never_used, tap_of


def print_coverage(console: Console, files: Sequence[FileCoverage], names: bool) -> None:
    """A line a file with tensors used and present, what is not used by tap, and the sum."""
    width = max(len(file.file) for file in files)
    console.print(f"{'golden file':<{width}}  {'used':>6}  {'present':>7}")
    for file in files:
        used, present = len(file.present) - len(file.unused), len(file.present)
        console.print(f"{file.file:<{width}}  {used:>6,}  {present:>7,}", soft_wrap=True)
        if names:
            for name in file.unused:
                console.print(f"  unused: {name}", soft_wrap=True)
        elif file.unused:
            taps = ", ".join(f"{tap} ({count})" for tap, count in sorted(file.unused_taps().items()))
            console.print(f"  unused: {taps}", soft_wrap=True)
    present = sum(len(file.present) for file in files)
    used = present - sum(len(file.unused) for file in files)
    kinds = {tap_of(name) for file in files for name in file.present}
    without = never_used(files)
    console.print()
    console.print(f"recorded tensors used by a case: {used:,} of {present:,} ({100 * used / present:.1f} %)")
    console.print(f"kinds of taps used by a case: {len(kinds) - len(without)} of {len(kinds)}")
    for tap in without:
        console.print(f"  used by no case: {tap}")
