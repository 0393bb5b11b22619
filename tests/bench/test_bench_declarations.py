"""Declarations: the shipped ones cover the goals, their hash changes with what is measured, damage is one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from bench_problems import SMALL

from conformance.bench import declarations
from conformance.bench.kernels import KERNELS
from conformance.bench.problem import Problem
from conformance.errors import ConformanceError

ALL = declarations.read()
GOOD = '[[shape]]\nkernel = "gate"\nname = "x"\nset = "small"\nsizes = { tokens = 1, width = 32, experts = 8 }\n'


def test_every_kernel_has_a_small_shape_and_one_at_the_released_sizes() -> None:
    assert {declared.kernel for declared in SMALL} == set(KERNELS)
    without_goal = {"linear_fp32"}
    assert {declared.kernel for declared in ALL if declared.set in declarations.RELEASED} == set(KERNELS) - without_goal


def test_goals_are_for_one_device_and_say_where_they_come_from() -> None:
    with_goal = [declared for declared in ALL if declared.goal is not None]
    assert len(with_goal) >= 25
    for declared in with_goal:
        assert declared.goal_source
        assert declared.goal_on("NVIDIA H200") is declared.goal
        assert declared.goal_on("NVIDIA H100 PCIe") is None
        assert declared.goal_on("AMD EPYC, 1 thread") is None
    assert not any(declared.goal for declared in SMALL)


def test_the_hash_is_of_what_is_measured() -> None:
    first = next(declared for declared in SMALL if declared.kernel == "rms_norm")
    same = replace(first, name="other", set="prefill", goal=None)
    assert same.hash == first.hash
    assert replace(first, sizes={**first.sizes, "tokens": 3}).hash != first.hash
    assert len({declared.hash for declared in ALL}) == len({(d.kernel, tuple(d.sizes.items())) for d in ALL})


def test_the_hash_changes_with_the_code_that_makes_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(declared for declared in SMALL if declared.kernel == "rms_norm")
    sources = declarations.inspect.getsource
    monkeypatch.setattr(declarations.inspect, "getsource", lambda module: sources(module) + "# more")
    assert replace(first).hash != first.hash


def test_selection() -> None:
    assert declarations.select(ALL, ("small",), []) == SMALL
    chosen = declarations.select(ALL, ("decode",), ["linear_*", "gate/64-tokens"])
    assert {declared.kernel for declared in chosen} == {"linear_fp8", "linear_fp4", "linear_bf16", "gate"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no [[shape]] in it"),
        ("[[shape", "shapes.toml: "),
        (GOOD + GOOD, "gate/x is declared twice"),
        (GOOD.replace('"gate"', '"gates"'), "shape 1: kernel gates is not one of quantize_fp8"),
        (GOOD.replace('"small"', '"large"'), "shape 1: set large is not one of small, decode, prefill"),
        (GOOD.replace("tokens = 1", "tokens = 0"), "shape 1: sizes are whole numbers from 1"),
        (GOOD.replace("tokens = 1", "tokens = 1.5"), "shape 1: sizes are whole numbers from 1"),
        (GOOD.replace("tokens = 1", f"tokens = {1 << 40}"), "shape 1: sizes are whole numbers from 1"),
        (GOOD.replace('name = "x"\n', ""), "shape 1: name is missing"),
        (GOOD + "speed = 1\n", "shape 1: speed is not one of goal, kernel"),
        (GOOD + "goal = { below = 1 }\n", "goals need [goals] with device and source"),
        (GOOD + "goal = { }\n", "goal: a table with percent or below"),
        (GOOD + 'goal = { percent = 5, of = "sky" }\n', "goal: of is one of copy, matmul"),
        (GOOD + "goal = { percent = -5 }\n", "goal: percent is a number above 0"),
        ("shape = 3\n", "no [[shape]] in it"),
        ("shape = " + "[" * 5000, "shapes.toml: maximum recursion depth"),
        ("[goals]\ndevice = 3\n" + GOOD, "[goals] has texts, device and source"),
        ("other = 3\n" + GOOD, "other is not one of goals, shape"),
    ],
)
def test_damaged_files(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "shapes.toml"
    path.write_text(text)
    with pytest.raises(ConformanceError) as refused:
        declarations.read(path)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kernel", "sizes", "why"),
    [
        ("gate", {"tokens": 1, "width": 32}, "the size 'experts' is missing"),
        ("rms_norm", {"tokens": 1, "width": 32, "eps": 1}, "x: sizes: eps is not one of tokens, width"),
        ("quantize_fp8", {"tokens": 1, "width": 33}, "width = 33 is not a multiple of 32"),
        ("experts", {"tokens": 1, "width": 32, "inner": 32, "experts": 9}, "not 8 kinds of experts"),
        ("sparse_attention", {"requests": 2, "tokens": 2, "heads": 8, "rows": 8, "listed": 4}, "one of the first is 1"),
    ],
)
def test_sizes_that_a_kernel_cannot_have(kernel: str, sizes: dict[str, int], why: str) -> None:
    with pytest.raises(ConformanceError, match="x: ") as refused:
        declarations.Declaration(kernel, "x", "small", sizes).problem()
    assert why in str(refused.value)


def test_sizes_beyond_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(sizes: Mapping[str, int]) -> Problem:
        raise MemoryError("Unable to allocate 16.0 TiB")

    monkeypatch.setattr(declarations, "KERNELS", {"rms_norm": refusing})
    with pytest.raises(ConformanceError, match="rms_norm/x: the memory is too small for these sizes"):
        declarations.Declaration("rms_norm", "x", "small", {}).problem()
