"""Untrusted code, code that is not as declared, and declarations that make no sense: one clear line each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from recording_options import DECLARATIONS, options

from conformance.errors import ConformanceError
from conformance.recording.record import record
from conformance.recording.scenarios import read_plan
from conformance.recording.upstream import PINNED, RecordingError

CLASS = "class Transformer(nn.Module):"
PLACED = "        h, image_mask = place(self, self.embed(input_ids),"


def refusal(checkout: Path, out: Path) -> str:
    with pytest.raises(ConformanceError) as error:
        record(options(out, checkout), lambda line: None)
    assert not out.exists()
    assert [path for path in out.parent.iterdir() if path.name.endswith(".partial")] == []
    text = str(error.value)
    assert text.isprintable()
    return text


def test_code_is_shown_and_not_executed_without_consent(tmp_path: Path) -> None:
    checkout = tmp_path / "inference"
    checkout.mkdir()
    (checkout / "model.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    (checkout / "config.json").write_text("{}")
    command = [sys.executable, "-m", "conformance", "record", "--upstream", str(checkout), "--out", str(tmp_path / "o")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "DIFFERS from the pinned revision" in run.stderr
    assert run.stderr.endswith("conformance: nothing was executed: read the code, then say --yes\n")
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "o").exists()


def test_pinned_hashes_are_those_of_the_shipped_recording() -> None:
    manifest = json.loads(resources.files("fixtures").joinpath("manifest.json").read_text())
    assert PINNED["model.py"] == manifest["upstream"]["model_py_sha256"]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (CLASS, "class Net(nn.Module):", "model.Transformer does not exist"),
        ("class ModelArgs(", "class Arguments(", "model.ModelArgs does not exist"),
        ("shared_attn", "slots", "model.shared_attn does not exist"),
        ("shared_attn.index_k", "shared_attn.keys", "shared_attn.index_k does not exist"),
        ("hc_post", "write_streams", "layers.0.hc_post does not exist (tap h_mid)"),
        ("self.q_norm", "self.latent_norm", "parameter layers.0.attn.q_norm.weight does not exist"),
        ('"kv_cache"', '"ring"', "kv_cache"),
        ("import act_quant,", "import act_quant, rope_kernel,", "cannot import name 'rope_kernel'"),
        ("act_quant(kv, 32, inplace=True)", "act_quant(kv, 32, in_place=True)", "parameter in_place"),
        ("return self.hc_post(y, h, post, comb), handed_on", "return (self.hc_post(y, h, post, comb),)", "pre"),
        ("self.head = Linear(", "self.extra = Norm(8, 0)\n        self.head = Linear(", "parameter extra.weight"),
        ("config.vocab_size, torch.float32)", "config.vocab_size, torch.bfloat16)", "tap logits"),
        ("self.attn_sink = frozen(config.n_heads,", "self.attn_sink = frozen(1,", "attn_sink is float32 [1]"),
        (CLASS, f"raise SystemExit('licence')\n{CLASS}", "SystemExit: licence"),
        (CLASS, f"import os.path, image_processor\n{CLASS}", "No module named 'image_processor'"),
        (f", images=None):\n{PLACED} images)", f"):\n{PLACED} None)", "unexpected keyword argument 'images'"),
        ("self.embed(input_ids), images)", "self.embed(input_ids), None)", "tap vit_out: output 0 at vision"),
        (CLASS, f"1 / 0\n{CLASS}", "ZeroDivisionError: division by zero"),
        (CLASS, f"{CLASS} (", "SyntaxError"),
    ],
)
def test_code_that_is_not_as_declared(
    changed: Callable[[str, str], Path], tmp_path: Path, old: str, new: str, fault: str
) -> None:
    line = refusal(changed(old, new), tmp_path / "out")
    assert line.startswith("upstream: ")
    assert fault in line


def test_a_checkout_that_is_none(tmp_path: Path) -> None:
    assert "not a directory" in refusal(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert "no model.py in it" in refusal(tmp_path / "empty", tmp_path / "out")
    os.mkfifo(tmp_path / "empty" / "model.py")
    assert "model.py: not a regular file" in refusal(tmp_path / "empty", tmp_path / "out")


@pytest.mark.parametrize(
    ("kernel", "fault"), [(None, "no kernel.py in it"), ("", "needs a CUDA device")], ids=["no-kernel", "no-device"]
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a CUDA device")
def test_kernels_that_cannot_run(
    changed: Callable[[str, str], Path], tmp_path: Path, kernel: str | None, fault: str
) -> None:
    checkout = changed(CLASS, CLASS)
    if kernel is not None:
        (checkout / "kernel.py").write_text(kernel)
    with pytest.raises(RecordingError, match=fault):
        record(replace(options(tmp_path / "out", checkout), kernels="upstream"), lambda line: None)


def test_a_key_that_no_set_declares(changed: Callable[[str, str], Path], tmp_path: Path) -> None:
    checkout = changed(CLASS, CLASS)
    (checkout / "config.json").write_text('{"dim": 1, "n_hash_layers": 3}')
    assert refusal(checkout, tmp_path / "out") == "set roles: key n_hash_layers of config.json is not declared"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(RecordingError, match="exists already"):
        record(options(out), lambda line: None)


def test_the_shipped_declarations_cover_the_published_configuration() -> None:
    plan = read_plan(None)
    released = json.loads(resources.files("conformance").joinpath("configs/released.json").read_bytes())
    for configuration in plan.configurations.values():
        assert released.keys() <= configuration.keys()
    assert {scenario.reading for scenario in plan.scenarios} == {"intended", "literal"}


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("seed = 7", "seed = '7'", "seed is not a number"),
        ("seed = 7", "", "seed is missing"),
        ("seed = 7", "seed = ", "not valid TOML"),
        ("prefill = 5", "prefill = 0", "prefill must be a number of at least 1"),
        ("prefill = 5", "prefill = 33", "beyond max_seq_len"),
        ("batch = 2", "batch = 3", "max_batch_size"),
        ('reading = "literal"', 'reading = "both"', "reading must be"),
        ('"logits"', '"logit"', "keep names no tap: logit"),
        ("batch = 2", "bacth = 2", "unknown key bacth"),
        ('name = "decode-from-03"', 'name = "../x"', "not a plain lower-case name"),
        ('name = "decode-from-03"', 'name = "weights"', "not a plain lower-case name"),
        ('name = "decode-from-03"', 'name = "prefill-05-batch2"', "two of one name"),
        ("dim = 32\nmoe", "moe", "'dim' is missing"),
        ("vision_n_layers = 2", "vision_n_layers = 0", "no vision_n_layers"),
        ("image_token_id = 60", "", "no image_token_id"),
        ("start = 2, rows", "start = 6, rows", "an image of 8 tokens at 6, the prompt has 13"),
        ("start = 2, rows", "rows", "image has exactly start, rows, columns"),
        ("rows = 4, col", "rows = 0, col", "rows must be a number from 1"),
        ("rows = 4, col", "rows = 99999999, col", "rows must be a number from 1"),
        ("prefill = 13\n", "prefill = 13\nbatch = 2\n", "an image takes a batch of 1"),
    ],
)
def test_declarations_that_make_no_sense(tmp_path: Path, old: str, new: str, fault: str) -> None:
    text = DECLARATIONS.read_text()
    assert old in text
    path = tmp_path / "declared.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(RecordingError) as error:
        read_plan(path)
    assert fault in str(error.value)
    assert str(error.value).startswith(str(path))
