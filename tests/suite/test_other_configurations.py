"""Nothing is tied to the shipped set: golden sets of other configurations, checked in full by the reference."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from golden_sets import Run, make_golden_sets

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.cases.case import Case
from conformance.cases.catalogue import cases_of
from conformance.cases.noise_floors import floors_of
from conformance.cases.traces import GoldenModel
from conformance.config import ModelConfig
from conformance.errors import FixtureError
from conformance.fixtures import Fixtures
from conformance.interface import COMPONENTS
from conformance.runner import CaseResult, run_case
from reference.config import Config as ReferenceConfig

BASE: Mapping[str, Any] = {
    "score_func": "sqrtsoftplus",
    "norm_eps": 1e-20,
    "hc_eps": 1e-6,
    "rope_theta": 5000,
    "compress_rope_theta": 30000.0,
    "original_seq_len": 24,
    "rope_factor": 6,
    "beta_fast": 8,
    "beta_slow": 1.5,
    "swiglu_limit": 4.0,
    "route_scale": 2.25,
}

EVERY_ROLE: Mapping[str, Any] = {
    **BASE,
    "vocab_size": 90,
    "dim": 96,
    "n_layers": 12,
    "n_heads": 3,
    "q_lora_rank": 32,
    "head_dim": 96,
    "rope_head_dim": 12,
    "o_groups": 3,
    "o_lora_rank": 32,
    "window_size": 5,
    "compress_ratios": [0, 2, 2, 2, 4, 4, 0, 1, 1, 1, 1, 0],
    "kv_source_layers": [1, 4, 7],
    "index_source_layers": [1, 2, 4, 7, 9],
    "index_n_heads": 3,
    "index_head_dim": 64,
    "index_topk": 5,
    "candidate_source_layer": 7,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 2,
    "moe_inter_dim": 32,
    "n_routed_experts": 5,
    "n_shared_experts": 0,
    "n_activated_experts": 2,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 7,
    "engram_layer_ids": [2],
    "engram_num_embeddings": [112],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 50,
    "engram_n_heads": 1,
    "engram_head_dim": 64,
    "engram_pad_id": 3,
    "engram_compressed_vocab_size": 37,
    "vision_n_layers": 3,
    "vision_dim": 24,
    "vision_n_heads": 3,
    "vision_inter_dim": 20,
    "vision_patch_size": 3,
    "vision_rope_theta": 500.0,
    "vision_downsample_ratio": 2,
    "image_token_id": 5,
}
"""Every role of an attention, a re-indexing layer before any candidates, ratios 0, 1, 2 and 4, no shared expert; a
vision tower whose cells are 2x2."""

SMALLEST: Mapping[str, Any] = {
    **BASE,
    "norm_eps": 1e-6,
    "vocab_size": 7,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 1,
    "q_lora_rank": 32,
    "head_dim": 32,
    "rope_head_dim": 32,
    "o_groups": 1,
    "o_lora_rank": 32,
    "window_size": 1,
    "compress_ratios": [1, 1],
    "kv_source_layers": [0],
    "index_source_layers": [0],
    "index_n_heads": 1,
    "index_head_dim": 32,
    "index_topk": 1,
    "moe_inter_dim": 32,
    "n_routed_experts": 1,
    "n_shared_experts": 1,
    "n_activated_experts": 1,
    "hc_mult": 1,
    "hc_sinkhorn_iters": 1,
}
"""One stream, head, expert, window row and selected row; no candidates and no Engram, whose keys are absent."""

PAIRED_CANDIDATES: Mapping[str, Any] = {
    **BASE,
    "vocab_size": 130,
    "dim": 64,
    "n_layers": 5,
    "n_heads": 4,
    "q_lora_rank": 64,
    "head_dim": 64,
    "rope_head_dim": 20,
    "o_groups": 4,
    "o_lora_rank": 8,
    "window_size": 7,
    "compress_ratios": [2, 2, 2, 2, 2],
    "kv_source_layers": [0, 1],
    "index_source_layers": [0, 1, 2],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 9,
    "candidate_source_layer": 1,
    "candidate_topk_blocks": 2,
    "candidate_block_size": 3,
    "moe_inter_dim": 64,
    "n_routed_experts": 7,
    "n_shared_experts": 2,
    "n_activated_experts": 4,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "engram_layer_ids": [0, 3],
    "engram_num_embeddings": [1154, 1480],
    "engram_max_ngram_size": 5,
    "engram_vocab_size": 120,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_id": 0,
    "engram_compressed_vocab_size": 130,
}
"""A candidate source of ratio 2 whose blocks hold fewer positions than the top-k; two shared experts; wo_a in FP8."""

WINDOW_ONLY: Mapping[str, Any] = {
    **SMALLEST,
    "n_layers": 1,
    "vocab_size": 33,
    "window_size": 40,
    "n_heads": 2,
    "compress_ratios": [0],
    "kv_source_layers": [],
    "index_source_layers": [],
    "candidate_source_layer": -1,
    "n_routed_experts": 3,
    "n_activated_experts": 2,
    "hc_mult": 5,
}
"""No layer compresses and the window never fills; the candidate source is -1."""


@dataclass(frozen=True)
class Other:
    """One golden set that nothing was adjusted to."""

    name: str
    mapping: Mapping[str, Any]
    runs: tuple[Run, ...]
    stored_wo_a: Literal["bf16", "fp8"] = "bf16"


OTHERS = (
    Other(
        "every-role",
        EVERY_ROLE,
        (
            Run("short-batch", 3, steps=5, batch=2),
            Run("wrap-literal", 4, steps=3, reading="literal"),
            Run("pictures", 11, steps=1, image=(2, 4)),
            Run("seen", 14, steps=2, image=(2, 12), grid=(5, 3)),
        ),
    ),
    Other("smallest", SMALLEST, (Run("one", 1), Run("from-one", 1, steps=4), Run("pair", 3, steps=2, batch=2))),
    Other(
        "paired-candidates",
        PAIRED_CANDIDATES,
        (Run("long", 23), Run("across", 5, steps=6), Run("odd-literal", 6, steps=3, batch=2, reading="literal")),
        "fp8",
    ),
    Other("window-only", WINDOW_ONLY, (Run("prompt", 11), Run("steps", 2, steps=3, batch=3))),
)


@dataclass(frozen=True)
class Made:
    """A golden set on disk and its cases."""

    other: Other
    directory: Path
    golden: GoldenModel
    cases: list[Case]


@pytest.fixture(scope="module", params=OTHERS, ids=lambda other: other.name)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    other: Other = request.param
    directory = tmp_path_factory.mktemp("golden") / "sets"
    make_golden_sets(directory, other.name, other.mapping, other.runs, stored_wo_a=other.stored_wo_a)
    fixtures = Fixtures.open(directory)
    golden = GoldenModel(fixtures.model(other.name))
    return Made(other, directory, golden, cases_of(golden, floors_of(fixtures, golden)))


def failures(results: list[CaseResult]) -> list[str]:
    """What to show of the cases that did not pass."""
    return [
        f"{result.status} {result.case.id}: {result.message} {result.reached} {result.first_failure}"
        for result in results
        if result.status != "PASS"
    ]


def test_the_reference_passes_every_case(made: Made) -> None:
    session = InProcess(Reference())
    results = [run_case(case, session) for case in made.cases]
    assert not failures(results)
    assert all(result.judged for result in results), "a case that judges nothing"
    assert len({case.id for case in made.cases}) == len(made.cases)


def test_more_precision_passes_every_case_with_a_derived_bound(made: Made) -> None:
    session = InProcess(Reference(compute=torch.float64, ties="earliest"))
    assert not failures([run_case(case, session) for case in made.cases if case.mode != "propagated"])


def test_every_component_and_role_has_cases(made: Made) -> None:
    config = made.golden.config
    # The synthetic runs record no drafts.
    absent = {"dspark"}
    if not config.kv_source_layers:
        absent |= {"compressor", "indexer"}
    if config.candidate_source_layer < 0:
        absent.add("candidates")
    if not config.engram_layer_ids:
        absent.add("engram")
    if not config.vision_n_layers:
        absent.add("vision")
    assert {case.component for case in made.cases} == set(COMPONENTS) - absent
    roles = {case.id.split("/")[1] for case in made.cases if case.component == "attention" and "/trace" not in case.id}
    expected = {config.role(layer) for layer in range(config.n_layers)}
    assert expected <= roles
    if made.other is OTHERS[0]:
        assert expected == EVERY_ROLE_NAMES


EVERY_ROLE_NAMES = {
    "window-only",
    "source-ratio-2",
    "source-ratio-4",
    "re-indexing",
    "reusing-ratio-2",
    "reusing-ratio-4",
    "candidate-source-ratio-1",
    "reusing-ratio-1",
    "reusing-re-indexed",
}


def test_the_command_line_on_another_set(tmp_path: Path) -> None:
    other = OTHERS[1]
    make_golden_sets(tmp_path / "sets", other.name, other.mapping, other.runs)
    command = [sys.executable, "-m", "conformance", "check", "reference", "--fixtures", str(tmp_path / "sets")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conforms: " in done.stdout


@pytest.mark.parametrize(
    ("key", "value"),
    [("dim", 80), ("q_lora_rank", 40), ("head_dim", 48), ("index_head_dim", 40), ("o_lora_rank", 12)],
)
def test_a_width_that_ends_inside_a_quantiser_group_is_refused(key: str, value: int) -> None:
    with pytest.raises(FixtureError, match=rf"small/config\.json: key '(o_groups' times ')?{key}' is .* groups of 32"):
        ModelConfig.from_mapping({**SMALLEST, key: value}, "small/config.json")


@pytest.mark.parametrize("absent", [{}, {"candidate_source_layer": None}, {"candidate_source_layer": -1}])
def test_no_candidate_source_may_be_written_in_three_ways(absent: Mapping[str, Any]) -> None:
    config = ModelConfig.from_mapping({**SMALLEST, **absent}, "small/config.json")
    assert not any(config.masked_by_candidates(layer) for layer in range(config.n_layers))
    assert ReferenceConfig.from_mapping({**SMALLEST, **absent}).candidate_source_layer is None
