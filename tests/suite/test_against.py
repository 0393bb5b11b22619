"""`conformance check TARGET --against reference`: faults that no shipped recording is long enough to show."""

from __future__ import annotations

from pathlib import Path

import against_ports
import pytest

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.against import command
from conformance.against.sizes import Requests, Size, Sizes, declared_sizes
from conformance.cases.catalogue import catalogue
from conformance.check import CheckOptions
from conformance.config import ModelConfig
from conformance.errors import ConformanceError, TargetError
from conformance.fixtures import Fixtures
from conformance.runner import run_case
from conformance.selection import Selection

SMALL = Sizes(
    7,
    {
        **declared_sizes().config,
        "n_layers": 2,
        "compress_ratios": [0, 1],
        "kv_source_layers": [1],
        "index_source_layers": [1],
        "candidate_source_layer": 1,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
    },
    (Size("any", (), (Requests("long", 67, "beyond what is recorded", steps=2),)),),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that is made in a moment."""
    monkeypatch.setattr(command, "declared_sizes", lambda: SMALL)


def options(target: str, *components: str) -> CheckOptions:
    return CheckOptions(target, Selection("core", None, components), against="reference")


def port(kind: type[Reference]) -> str:
    return f"{kind.__module__}:{kind.__name__}"


def test_a_fault_beyond_the_recordings_is_found(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [case for case in catalogue(Fixtures.open(None)) if case.id.startswith("attention/window-only/")]
    session = InProcess(against_ports.LongAttention())
    assert len(cases) > 3
    assert {run_case(case, session).status for case in cases} == {"PASS"}
    faulty = port(against_ports.LongAttention)
    assert command.check_against(options(faulty, "attention")) == 1
    shown = capsys.readouterr().out
    assert "made from the reference for this run" in " ".join(shown.split())
    assert f"conformance check {faulty} --against reference -k attention/window-only/" in shown
    assert command.check_against(options("reference", "attention")) == 0


def test_a_model_that_parts_late_is_traced(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Every component is right alone; what is kept between calls is not."""
    asked = CheckOptions(port(against_ports.LongModel), Selection("core", "model/embed"), against="reference")
    assert command.check_against(asked) == 0, "a narrowed run is not traced"
    with command.golden_sets(SMALL, SMALL.sizes[0]) as directory:
        assert command.trace_layers(options(port(against_ports.LongModel)), directory) == 1
        shown = capsys.readouterr().out
        assert "First divergence: layer 0, attn_o" in shown
        assert "free-running distance of h_out by layer" in shown
        assert command.trace_layers(options("reference"), directory) == 0


@pytest.mark.parametrize("size", declared_sizes().sizes, ids=lambda size: size.name)
def test_declared_sizes_are_beyond_the_recordings(size: Size) -> None:
    shipped = Fixtures.open(None, verify=False).model("tiny")
    recorded = [(max(s.start_positions) + s.lengths[-1], s.batch) for s in shipped.scenarios.values()]
    config = ModelConfig.from_mapping({**shipped.config, **declared_sizes().config}, "sizes.toml")
    assert max(run.prefill + run.steps for run in size.runs) > 2 * max(length for length, _ in recorded)
    assert max(run.prefill for run in size.runs) > 6 * config.window_size
    assert max(run.batch for run in size.runs) > 3 * max(batch for _, batch in recorded)
    assert {config.role(layer) for layer in range(config.n_layers)} >= {
        "window-only",
        "source-ratio-2",
        "candidate-source-ratio-1",
        "re-indexing",
    }
    assert all(run.prefill + run.steps <= declared_sizes().config["max_seq_len"] for run in size.runs)


def test_the_size_follows_from_the_device() -> None:
    sizes = declared_sizes()
    assert sizes.of_device("cpu").name == sizes.of_device("Triton interpreter").name == "cpu"
    assert sizes.of_device("NVIDIA H200").name == sizes.of_device("mps").name == "accelerator"


def test_what_does_not_go_together_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="a folder has answered already"):
        command.check_against(options(f"dir:{tmp_path}"))
    with pytest.raises(ConformanceError, match="--fixtures: not with --against"):
        command.check_against(CheckOptions("reference", Selection("core"), fixtures=tmp_path, against="reference"))
