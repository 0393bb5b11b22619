"""The report of `conformance checkpoint`: which configuration, counts by unit, problems in groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from conformance.checkpoint import KINDS, Checkpoint, Kind, Problem
from conformance.checkpoint_counts import counts
from conformance.tensors import one_line

EXAMPLES = 3
MAX_LINES = 40


def print_checkpoint(console: Console, checkpoint: Checkpoint) -> None:
    """Print everything that a reader needs to find what is wrong; the last line is the verdict."""

    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    line(f"checkpoint {one_line(str(checkpoint.directory))}")
    line(f"configuration: {checkpoint.configuration}")
    line(f"read: headers of {len(checkpoint.shards):,} shards, {len(checkpoint.found):,} tensors")
    if checkpoint.absent:
        line(f"partial: {len(checkpoint.absent):,} shards are absent and were not checked")
    line(f"\n{'parameters':<44}{'expected':>18}{'found':>18}")
    for count in counts(checkpoint.layout, checkpoint.elements):
        differs = "" if count.expected == count.found else "  differs"
        line(f"{count.unit:<44}{count.expected:>18,}{count.found:>18,}{differs}")
    line("")
    for text in checkpoint.unreadable[:MAX_LINES]:
        line(f"unreadable: {text}")
    if len(checkpoint.unreadable) > MAX_LINES:
        line(f"unreadable: and {len(checkpoint.unreadable) - MAX_LINES:,} more files")
    _print_problems(line, checkpoint.problems)
    verdict = {0: "conforms", 1: "does not conform", 2: "could not be read in full"}[checkpoint.exit_code]
    line(f"{verdict}: {len(checkpoint.problems):,} problems, {len(checkpoint.unreadable):,} unreadable files")


def _print_problems(line: Callable[[str], None], problems: Sequence[Problem]) -> None:
    grouped: dict[tuple[Kind, str], list[Problem]] = {}
    for problem in problems:
        grouped.setdefault(problem.group, []).append(problem)
    ordered = sorted(grouped.items(), key=lambda item: (KINDS.index(item[0][0]), -len(item[1]), item[0][1]))
    for (kind, pattern), members in ordered[:MAX_LINES]:
        if len(members) == 1:
            line(f"{kind}: {one_line(members[0].name)}: {members[0].detail}")
            continue
        line(f"{kind}: {one_line(pattern)}: {len(members):,} times")
        for member in members[:EXAMPLES]:
            line(f"    {one_line(member.name)}: {member.detail}")
    if len(ordered) > MAX_LINES:
        rest = sum(len(members) for _, members in ordered[MAX_LINES:])
        line(f"and {rest:,} more problems in {len(ordered) - MAX_LINES:,} groups")
