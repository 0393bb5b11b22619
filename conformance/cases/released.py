"""Cases of a recipe set: components at the released widths, weights and inputs from a formula."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.cases.case import Case
from conformance.fixtures import RecipeSet


def cases(recipe: RecipeSet) -> Iterator[Case]:
    """All cases of the set."""
    return iter(())
