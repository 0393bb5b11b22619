"""Peers: each passes the gate where it computes the same, and is refused where it cannot be had."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_problems import answer, problem_of
from bench_runs import DEVICE

from conformance.adapters.reference import Reference
from conformance.bench import gate, peers, targets
from conformance.bench.gate import Refused
from conformance.errors import TargetError
from conformance.recording import upstream as declared

KERNEL = """
import torch
from conformance.adapters import upstream_kernels as own

def act_quant(x, block_size=128, scale_fmt=None, scale_dtype=None, inplace=False):
    return own.act_quant(x, block_size, scale_fmt, scale_dtype, inplace)

def fp4_act_quant(x, block_size=32, inplace=False):
    return own.fp4_act_quant(x, block_size, inplace)

def fp8_gemm(a, a_s, b, b_s, scale_dtype=None):
    assert torch.get_default_dtype() is torch.bfloat16
    return own.module().fp8_gemm(a, a_s, b, b_s, scale_dtype)

fp4_gemm = lambda *args: own.module().fp4_gemm(*args)
sparse_attn = own.sparse_attn
hc_split_sinkhorn = own.hc_split_sinkhorn
"""


@pytest.mark.parametrize("name", ["sparse_attention/small", "sparse_attention/small-requests"])
def test_torchs_attention_computes_the_same(name: str) -> None:
    subject = peers.sdpa(DEVICE)
    for call in (0, 1):
        gate.judge(problem_of(name), subject.description, call, answer(subject.implementation, name, call))


def test_torchs_attention_without_its_sink_does_not() -> None:
    class WithoutSink(peers.SdpaAttention):
        def sparse_attention(self, q: Any, kv: Any, indices: Any, sink: Any, scale: float) -> Any:
            return super().sparse_attention(q, kv, indices, torch.full_like(sink, -torch.inf), scale)

    name = "sparse_attention/small"
    with pytest.raises(Refused):
        gate.judge(problem_of(name), peers.sdpa(DEVICE).description, 0, answer(WithoutSink(), name, 0))


def test_the_compiler_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.shutil, "which", lambda name: None)
    with pytest.raises(TargetError, match=r"torch\.compile: on a CPU it needs a C\+\+ compiler"):
        targets.open_subject("torch.compile", DEVICE, agreed=False)


@pytest.mark.skipif(not any(map(shutil.which, peers.COMPILERS)), reason="no C++ compiler")
def test_the_compiled_reference_passes_the_gate() -> None:
    subject = targets.open_subject("torch.compile", DEVICE, agreed=False)
    name = "rms_norm/small"
    subject.afresh()
    with subject.surroundings():
        gate.judge(problem_of(name), subject.description, 0, answer(subject.implementation, name, 0))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with kernels of the suite's own, which make bf16 where torch's default is bf16."""
    (tmp_path / f"{declared.KERNEL}.py").write_text(KERNEL)
    (tmp_path / f"{declared.ENTRY}.py").write_text("import kernel\n")
    (tmp_path / declared.CONFIG_FILE).write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "quantize_fp8/small",
        "quantize_fp4_e8m0/small",
        "quantize_fp4_e4m3/small",
        "linear_fp8/small",
        "linear_fp4/small",
        "sparse_attention/small",
        "hyper_connection_coefficients/small",
    ],
)
def test_published_kernels_are_called_as_they_are_declared(checkout: Path, name: str) -> None:
    subject = targets.open_subject(f"upstream:{checkout}", DEVICE, agreed=True)
    with subject.surroundings():
        returned = answer(subject.implementation, name, 0)
    gate.judge(problem_of(name), subject.description, 0, returned)
    assert torch.get_default_dtype() is torch.float32


def test_published_code_runs_only_after_agreement(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / f"{declared.KERNEL}.py").write_text("raise SystemExit('executed')")
    with pytest.raises(TargetError, match="nothing was executed: read the code, then say --yes"):
        targets.open_subject(f"upstream:{checkout}", DEVICE, agreed=False)
    assert f"{declared.KERNEL}.py" in capsys.readouterr().err
    with pytest.raises(TargetError, match=r"kernel\.py:1: SystemExit: executed"):
        targets.open_subject(f"upstream:{checkout}", DEVICE, agreed=True)


def test_a_checkout_without_kernels(checkout: Path) -> None:
    (checkout / f"{declared.KERNEL}.py").unlink()
    with pytest.raises(TargetError, match=r"no kernel\.py in it"):
        targets.open_subject(f"upstream:{checkout}", DEVICE, agreed=True)


def test_a_fused_norm_is_used_where_there_is_one() -> None:
    class Fused(Reference):
        def rms_norm_quantize_fp8(self, x: Any, weight: Any, eps: float) -> Any:
            return self.quantize_fp8(super().rms_norm(x, weight, eps))

        def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
            raise AssertionError("not fused")

    name = "norm_quantize/small"
    gate.judge(problem_of(name), Reference().describe(), 0, answer(Fused(), name, 0))
