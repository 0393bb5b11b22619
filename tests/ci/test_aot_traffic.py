"""The counting of memory traffic sees what a kernel asks for, and the gate fails when that changes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("aot_gate_of_traffic", ROOT / "ci" / "aot" / "gate.py")
assert SPEC is not None
assert SPEC.loader is not None
gate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gate)

KERNELS = """
import json
import sys

sys.path.insert(0, {folder!r})
import traffic
import launches
import torch
import triton
import triton.language as tl
from optimized.expert_stack import stack_experts
from optimized.experts import grouped_experts


@triton.jit
def _scale(x, factor, out, count, AGAIN: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    values = tl.load(x + at, at < count, other=0.0) * tl.load(factor + at * 0)
    if AGAIN:
        values += tl.load(x + at, at < count, other=0.0)
    tl.store(out + at, values, at < count)


@triton.jit
def _product(a, b, out, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    square = rows * SIZE + columns
    tl.store(out + square, tl.dot(tl.load(a + square), tl.load(b + square)))
    tl.atomic_add(out + square, 1.0)


def scaled(again):
    x, out = torch.ones(100), torch.empty(100)
    _scale[(4,)](x, torch.ones(1), out, 100, again, 32)


def multiplied():
    _product[(1,)](torch.ones(16, 16), torch.ones(16, 16), torch.empty(16, 16), 16)


def mixed(experts):
    weights = {{}}
    for number in range(experts):
        for matrix, rows, columns in (("w1", 128, 64), ("w2", 64, 128), ("w3", 128, 64)):
            name = f"experts.{{number}}.{{matrix}}"
            weights[f"{{name}}.weight"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
            weights[f"{{name}}.scale"] = torch.full((rows, columns // 32), 127, dtype=torch.uint8)
    stack = stack_experts(weights, {{number: f"experts.{{number}}" for number in range(experts)}}, experts)
    x, place = torch.ones(16, 64, dtype=torch.bfloat16), torch.full((16, 1), experts - 1, dtype=torch.int32)
    grouped_experts(launches.CONFIG, stack, x, place, torch.ones(16, 1))


for experts in (1, 8):
    for line in traffic.counted("", lambda: mixed(experts)):
        print(json.dumps(line | {{"plan": f"{{line['kernel']}} {{experts}}"}}))
for name, call in (("once", lambda: scaled(False)), ("again", lambda: scaled(True)), ("product", multiplied)):
    for line in traffic.counted(name, call):
        print(json.dumps(line))
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a process counts of kernels that are known; counting changes how `optimized` is set up."""
    pytest.importorskip("triton")
    script = tmp_path_factory.mktemp("kernels") / "kernels.py"
    script.write_text(KERNELS.format(folder=str(ROOT / "ci" / "aot")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return {line["plan"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_masked_elements_and_shared_addresses_are_not_counted(counted: dict[str, dict[str, Any]]) -> None:
    # 100 of 128 elements; the factor once a program, by four programs.
    assert (counted["once"]["read"], counted["once"]["written"]) == (4 * 100 + 4 * 4, 4 * 100)
    assert counted["once"]["once"] == 4 * 100 + 4 + 4 * 100


def test_reading_twice_is_seen(counted: dict[str, dict[str, Any]]) -> None:
    once, again = counted["once"], counted["again"]
    assert again["read"] - once["read"] == 4 * 100
    assert again["once"] == once["once"]
    assert again["ratio"] > once["ratio"]


def test_products_and_atomics_are_counted(counted: dict[str, dict[str, Any]]) -> None:
    line = counted["product"]
    assert line["products"] == 16**3
    assert (line["read"], line["written"]) == (3 * 4 * 256, 2 * 4 * 256)


@pytest.mark.parametrize("kernel", ["experts._up_kernel", "experts._down_kernel"])
def test_experts_without_tokens_move_nothing(kernel: str, counted: dict[str, dict[str, Any]]) -> None:
    one, eight = counted[f"{kernel} 1"], counted[f"{kernel} 8"]
    assert (eight["written"], eight["products"]) == (one["written"], one["products"])
    # 16 rows may need eight tiles, one an expert; the seven that are not needed read where they would begin and end.
    columns = 128 // 64 if "up" in kernel else 1
    assert eight["read"] - one["read"] == 7 * columns * 3 * 8


LINE = {
    "kernel": "norm._norm_kernel",
    "plan": "rms_norm/1",
    "constants": {"ROWS": 1},
    "read": 512,
    "written": 256,
    "once": 768,
    "ratio": 1.0,
    "products": 0,
}


def test_a_change_of_traffic_fails_with_a_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tables").mkdir()
    monkeypatch.setattr(gate, "HERE", tmp_path)
    assert gate.judge(gate.TRAFFIC, [LINE], "3.9.0", update=True) == []
    # Another version of the compiler changes nothing of what kernels ask for.
    assert gate.judge(gate.TRAFFIC, [LINE], "3.6.0", update=False) == []
    wrong = gate.judge(gate.TRAFFIC, [LINE | {"read": 768, "ratio": 1.333}], "3.6.0", update=False)
    removed, added = (next(text for text in wrong if text.startswith(sign + "    ")) for sign in "-+")
    assert '"read": 512' in removed
    assert '"read": 768' in added
    assert '"ratio": 1.333' in added


def test_the_table_that_is_checked_in_is_complete() -> None:
    launches = json.loads((ROOT / "ci" / "aot" / "tables" / "traffic.json").read_text())["launches"]
    compiled = json.loads((ROOT / "ci" / "aot" / "tables" / "sm_90.json").read_text())["specialisations"]
    # Every kernel that is compiled is also counted, at other sizes.
    assert {label.split()[0] for label in launches} >= {label.split()[0] for label in compiled}
    for counts in launches.values():
        assert counts["read"] + counts["written"] >= counts["once"] > 0
