"""A configuration that is none is the set's fault, in one line that names the key, before a target is asked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import fixtures as shipped
from conformance.config import ModelConfig
from conformance.errors import FixtureError
from reference.config import Config as ReferenceConfig

TINY: Mapping[str, Any] = json.loads((Path(shipped.__file__).parent / "tiny" / "config.json").read_text())
RELEASED = json.loads(resources.files("conformance").joinpath("configs/released.json").read_bytes())

DAMAGE: tuple[tuple[str, Any], ...] = (
    ("hc_mult", 0),
    ("hc_mult", -4),
    ("hc_mult", 10**9),
    ("hc_sinkhorn_iters", 0),
    ("hc_sinkhorn_iters", 10**9),
    ("hc_eps", -1.0),
    ("norm_eps", -1e-6),
    ("n_layers", 0),
    ("n_heads", 0),
    ("n_heads", TINY["n_heads"] + 1),
    ("o_groups", 0),
    ("o_groups", 3),
    ("head_dim", 0),
    ("rope_head_dim", 0),
    ("rope_head_dim", 7),
    ("n_activated_experts", 0),
    ("n_activated_experts", TINY["n_routed_experts"] + 1),
    ("n_shared_experts", -1),
    ("window_size", 0),
    ("window_size", 10**12),
    ("vocab_size", 0),
    ("vocab_size", 10**12),
    ("index_topk", 0),
    ("index_n_heads", 0),
    ("rope_theta", 0.0),
    ("compress_rope_theta", 1.0),
    ("rope_factor", 0),
    ("original_seq_len", 0),
    ("beta_fast", -1),
    ("swiglu_limit", 0.0),
    ("compress_ratios", [-1, *TINY["compress_ratios"][1:]]),
    ("compress_ratios", TINY["compress_ratios"][:2]),
    ("compress_ratios", [*TINY["compress_ratios"][: TINY["n_layers"] - 1], 3, 0, 0, 0]),
    ("kv_source_layers", [*TINY["kv_source_layers"], TINY["n_layers"]]),
    ("kv_source_layers", [-1, *TINY["kv_source_layers"]]),
    ("kv_source_layers", list(reversed(TINY["kv_source_layers"]))),
    ("kv_source_layers", []),
    ("kv_source_layers", [True]),
    ("index_source_layers", [0, *TINY["index_source_layers"]]),
    ("index_source_layers", TINY["index_source_layers"][1:]),
    ("candidate_source_layer", TINY["n_layers"] + 3),
    ("candidate_topk_blocks", 0),
    ("candidate_block_size", -8),
    ("engram_layer_ids", [TINY["n_layers"]]),
    ("engram_num_embeddings", [-5] * len(TINY["engram_num_embeddings"])),
    ("engram_num_embeddings", [*TINY["engram_num_embeddings"], 7]),
    ("engram_n_heads", -1),
    ("engram_head_dim", 0),
    ("engram_max_ngram_size", 1),
    ("engram_vocab_size", 0),
    ("engram_compressed_vocab_size", -3),
    ("engram_pad_id", -1),
    ("dspark_target_layer_ids", [TINY["n_layers"]]),
    ("dspark_n_activated_experts", TINY["dspark_n_routed_experts"] + 1),
    ("dspark_noise_token_id", -2),
    ("vision_patch_size", 0),
    ("score_func", "softmax"),
)


@pytest.mark.parametrize(("key", "value"), DAMAGE, ids=lambda value: str(value)[:40])
def test_the_line_names_file_and_key(key: str, value: Any) -> None:
    with pytest.raises(FixtureError) as caught:
        ModelConfig.from_mapping({**TINY, key: value}, "tiny/config.json")
    message = str(caught.value)
    assert message.startswith("tiny/config.json: ")
    assert key in message
    assert "\n" not in message


@pytest.mark.parametrize("mapping", [TINY, RELEASED], ids=["tiny", "released"])
def test_whatever_is_let_through_the_reference_accepts(mapping: Mapping[str, Any]) -> None:
    """Each number of a good configuration in turn replaced by others."""
    for field in fields(ModelConfig):
        listed = str(field.type).startswith("tuple")
        values = ([], [-1], [0], [10**6], [3, 1]) if listed else (-1, 0, 1, 2, 3, 7, 64, 10**6, 10**13, math.nan)
        for value in values:
            changed = {**mapping, field.name: value}
            with contextlib.suppress(FixtureError):
                ModelConfig.from_mapping(changed, "config.json")
                ReferenceConfig.from_mapping(changed)


@pytest.mark.parametrize(("key", "value"), [("hc_mult", 0), ("engram_n_heads", -1)])
def test_the_command_ends_with_one_line_and_exit_code_2(key: str, value: Any, tmp_path: Path) -> None:
    source = Path(shipped.__file__).parent
    shutil.copytree(source / "tiny", tmp_path / "tiny")
    (tmp_path / "tiny" / "config.json").write_text(json.dumps({**TINY, key: value}))
    manifest = json.loads((source / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "files": {}}))
    manifest["files"] = {f"tiny/{path.name}": _sha256(path) for path in (tmp_path / "tiny").iterdir()}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    command = [sys.executable, "-m", "conformance", "check", "reference", "--fixtures", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"tiny/config.json: key {key!r}" in done.stderr


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
