"""The pages of several reports: two beside each other, or a table of many."""

from __future__ import annotations

from conformance.report.compare import Comparison, sections
from conformance.report.html.page import render
from conformance.report.matrix import Matrix
from conformance.report.summary import TONES

SHOWN = 2000
"""Lines of each list of a comparison."""
VERDICT_TONES = {0: "good", 1: "bad", 2: "warn"}


def compare_page(comparison: Comparison) -> str:
    """Two reports: what got worse, what got better, and what differs between the runs."""
    word, _, rest = comparison.sentence.partition(":")
    return render(
        "compare.html.j2",
        comparison=comparison,
        sections=sections(comparison),
        verdict={
            "word": word[:1].upper() + word[1:],
            "rest": rest.strip(),
            "tone": VERDICT_TONES[comparison.exit_code],
        },
        tones=TONES,
        shown=SHOWN,
    )


def matrix_page(matrix: Matrix) -> str:
    """Many reports: implementation by component."""
    return render("matrix.html.j2", matrix=matrix)
