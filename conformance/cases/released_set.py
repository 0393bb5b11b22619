"""A recipe set at the released configuration: recordings, and the inputs and weights that belong to them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from conformance.cases.model import released_configuration
from conformance.config import ModelConfig
from conformance.fixtures import RecipeSet
from conformance.judge.components.linear import Parameters
from conformance.recipe import RecipeTensor
from conformance.recipe_weights import RecipeWeights
from conformance.tensors import SafetensorsFile, Tensor


class Released:
    """One recipe set."""

    def __init__(self, recipe: RecipeSet) -> None:
        self.name = recipe.name
        self.parts = recipe.parts
        self.seed = recipe.seed
        self.mapping: Mapping[str, Any] = released_configuration()
        self.config = ModelConfig.from_mapping(self.mapping, "configs/released.json")

    @cached_property
    def weights(self) -> RecipeWeights:
        """Every parameter that the recipe covers, under checkpoint names."""
        return RecipeWeights(self.config, self.seed)

    @cached_property
    def parameters(self) -> Parameters:
        """The same for the judge."""
        return Parameters(self.weights)

    def input(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An input of kind `input`, bf16."""
        return RecipeTensor(name, "input", shape, self.seed).tensor()

    def part(self, stem: str) -> SafetensorsFile:
        """The recording of that name."""
        return self.parts[stem]
