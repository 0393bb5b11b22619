"""Traces of dumped tensors: what is there is judged, what is missing is blank, what is hostile is one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dumps import Taps, recorded, scaled, write_dump

from conformance.cases.traces import Trace
from conformance.errors import TargetError
from conformance.tensors import Tensor, write_safetensors
from conformance.tracing.trace import Traced, TraceOptions, trace

Traces = dict[str, Trace]
SCENARIO = "prefill-17"


def traced(folder: Path) -> Traced:
    return trace(TraceOptions(f"dir:{folder}"), lambda _: None)


def test_the_recording_itself_does_not_diverge(tmp_path: Path, traces: Traces) -> None:
    found = traced(write_dump(tmp_path, traces["decode-from-33"], lambda _, taps: taps))
    assert found.exit_code == 0
    assert {cell.state for cell in found.findings[0].cells} == {"same"}
    judged = {verdict.tap for verdict in found.findings[0].introduced}
    assert {"attn_out", "ffn_out", "h_mid", "gate_indices", "selected", "engram_out", "logits"} <= judged


@pytest.mark.parametrize("half", [0, 1])
def test_half_the_taps_are_enough(tmp_path: Path, traces: Traces, half: int) -> None:
    def every_other(call: int, taps: Taps) -> Taps:
        return {name: taps[name] for name in list(taps)[half::2]}

    found = traced(write_dump(tmp_path, traces[SCENARIO], every_other))
    assert found.exit_code == 0
    assert 0 < len(found.findings[0].cells) < len(recorded(traces[SCENARIO], 0)) / 2 + 1


@pytest.mark.parametrize(
    ("tap", "layer", "component"),
    [
        ("ffn_out", 3, "mixture"),
        ("attn_out", 8, "attention"),
        ("h_mid", 5, "write after attention"),
        ("h_out", 11, "write after the mixture"),
        ("engram_out", 4, "Engram"),
        ("attn_in", 9, "read before attention"),
        ("ffn_comb", 2, "hyper-connection"),
        ("index_keys", 6, "attention"),
    ],
)
def test_a_wrong_tap_is_found_where_it_was_made(
    tmp_path: Path, traces: Traces, tap: str, layer: int, component: str
) -> None:
    name = f"layer{layer}/{tap}"
    found = traced(write_dump(tmp_path, traces[SCENARIO], lambda _, taps: {**taps, name: scaled(taps[name], 1.5)}))
    (finding,) = found.findings
    assert found.exit_code == 1
    assert finding.wrong is not None
    assert finding.divergence is not None
    assert (finding.wrong.layer, finding.wrong.component, finding.wrong.tap) == (layer, component, tap)
    assert (finding.divergence.layer, finding.divergence.tap) == (layer, tap)
    assert f"layer {layer}'s {component} is the first that is wrong" in finding.sentences()[-1]


def test_distances_alone_name_a_layer_when_only_residuals_and_choices_are_shown(tmp_path: Path, traces: Traces) -> None:
    def change(call: int, taps: Taps) -> Taps:
        shown = {n: t for n, t in taps.items() if n.endswith(("/h_out", "/gate_indices", "/selected"))}
        return {n: scaled(t, 1.5) if n == "layer6/h_out" else t for n, t in shown.items()}

    (finding,) = traced(write_dump(tmp_path, traces[SCENARIO], change)).findings
    assert finding.divergence is not None
    assert (finding.divergence.layer, finding.divergence.tap, finding.divergence.state) == (6, "h_out", "beyond")
    assert not finding.introduced


def test_another_choice_is_no_tie_if_the_recorded_scores_forbid_it(tmp_path: Path, traces: Traces) -> None:
    shown = traces[SCENARIO]
    worst = recorded(shown, 0)["layer0/gate_indices"].data.copy()
    worst[:] = (worst + 5) % shown.model.config.n_routed_experts
    change = {"layer0/gate_indices": Tensor("I32", worst)}
    (finding,) = traced(write_dump(tmp_path, shown, lambda _, taps: change)).findings
    assert finding.divergence is not None
    assert (finding.divergence.tap, finding.divergence.state) == ("gate_indices", "choice")


def not_a_number(tensor: Tensor) -> Tensor:
    values = tensor.values()
    values.reshape(-1)[3] = np.nan
    return Tensor.from_values(values, tensor.dtype)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (not_a_number, "not finite"),
        (lambda tensor: tensor[:, :-1], "wrong shape"),
        (lambda tensor: Tensor("I32", np.zeros(tensor.shape, np.int32)), "wrong dtype"),
        (lambda tensor: Tensor("F32", tensor.values().astype(np.float32) + np.float32(1e-4)), "not rounded"),
        (lambda tensor: scaled(tensor, 0.0), "relative distance 1"),
    ],
)
def test_a_malformed_tap_diverges(
    tmp_path: Path, traces: Traces, change: Callable[[Tensor], Tensor], said: str
) -> None:
    name = "layer3/attn_out"
    found = traced(write_dump(tmp_path, traces[SCENARIO], lambda _, taps: {**taps, name: change(taps[name])}))
    assert found.exit_code == 1
    assert said in found.findings[0].sentences()[0]


def damaged(how: str, folder: Path, shown: Trace) -> None:
    file = write_dump(folder, shown, lambda _, taps: taps) / shown.name / "0.safetensors"
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "header":
        file.write_bytes(b"\xff" * 64)
    elif how == "empty file":
        file.write_bytes(b"")
    elif how == "unknown tap":
        write_safetensors(file, {"layer0/attention": Tensor("I32", np.zeros(1, np.int32))})
    elif how == "unknown layer":
        write_safetensors(file, {"layer99/attn_out": Tensor("I32", np.zeros(1, np.int32))})
    elif how == "unknown call":
        file.rename(file.with_name("7.safetensors"))
    elif how == "unknown scenario":
        file.parent.rename(file.parent.with_name("prefill-99"))
    elif how == "link":
        file.rename(folder / "elsewhere")
        file.symlink_to(folder / "elsewhere")
    elif how == "pipe":
        file.unlink()
        os.mkfifo(file)
    elif how == "nothing":
        file.unlink()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("truncated", "prefill-17/0.safetensors: tensor"),
        ("header", "prefill-17/0.safetensors"),
        ("empty file", "prefill-17/0.safetensors: truncated"),
        ("unknown tap", "layer0/attention"),
        ("unknown layer", "layer99/attn_out"),
        ("unknown call", "prefill-17/7.safetensors: not a call"),
        ("unknown scenario", "prefill-99: not a scenario"),
        ("link", "link"),
        ("pipe", "not a regular file"),
        ("nothing", "no tap in it"),
    ],
)
def test_hostile_folders_are_one_line(tmp_path: Path, traces: Traces, how: str, said: str) -> None:
    folder = tmp_path / "dump"
    damaged(how, folder, traces[SCENARIO])
    if how == "link":
        (folder / "elsewhere").rename(tmp_path / "elsewhere")
    with pytest.raises(TargetError) as error:
        traced(folder)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_command_writes_json_and_its_exit_code(tmp_path: Path, traces: Traces) -> None:
    name = "layer3/ffn_out"
    folder = write_dump(tmp_path / "dump", traces[SCENARIO], lambda _, taps: {**taps, name: scaled(taps[name], 2.0)})
    command = [sys.executable, "-m", "conformance", "trace", f"dir:{folder}", "--json", str(tmp_path / "trace.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert "layer 3's mixture is the first that is wrong" in " ".join(done.stdout.split())
    content = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    (scenario,) = content["scenarios"]
    assert content["diverges"]
    assert scenario["first_divergence"]["tap"] == "ffn_out"
    assert scenario["first_wrong_on_own_inputs"]["component"] == "mixture"
    bad = subprocess.run([*command[:4], f"dir:{tmp_path / 'none'}"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert bad.stderr.count("\n") == 1
