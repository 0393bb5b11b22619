"""Declared benchmarks with what the reference answers to them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from conformance.adapters.in_process import InProcess, to_torch
from conformance.adapters.target import open_target
from conformance.bench import declarations
from conformance.bench.problem import Problem
from conformance.cases.case import is_weights
from conformance.interface import Implementation
from conformance.tensors import Tensor

SMALL = declarations.select(declarations.read(), ("small",), [])


@cache
def reference() -> Implementation:
    session = open_target("reference")
    assert isinstance(session, InProcess)
    return session.implementation


@cache
def problem_of(name: str) -> Problem:
    return next(declared for declared in SMALL if declared.id == name).problem()


def handed_over(problem: Problem, call: int) -> dict[str, Any]:
    def converted(value: Any) -> Any:
        if isinstance(value, Tensor):
            return to_torch(value)
        return {name: to_torch(tensor) for name, tensor in value.items()} if is_weights(value) else value

    return {name: converted(value) for name, value in problem.arguments(call).items()}


def answer(implementation: Implementation, name: str, call: int) -> tuple[torch.Tensor, ...]:
    """Results of one call, always as a tuple."""
    problem = problem_of(name)
    returned = problem.bind(implementation, handed_over(problem, call))()
    return returned if isinstance(returned, tuple) else (returned,)


@cache
def right_answer(name: str, call: int) -> tuple[torch.Tensor, ...]:
    return answer(reference(), name, call)
