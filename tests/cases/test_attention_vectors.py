"""Vectors of the attention's components, Engram, blocks and the model: honest variants pass, mistakes do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import pytest
import torch

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.cases.case import Case
from conformance.cases.flags import load_flags
from conformance.cases.vectors import (
    attention,
    candidates,
    compressor,
    engram,
    indexer,
    model,
    sampling,
    sparse_attention,
    window,
)
from conformance.faults.catalogue import FAULTS
from conformance.faults.honest import HONEST_VARIANTS, HonestVariant
from conformance.faults.honest_run import applies
from conformance.faults.patches import Edit, patched
from conformance.faults.prepared import PreparedCase, same
from conformance.interface import Array, Config
from conformance.runner import run_case
from tests.cases.vector_faults import CAUGHT, MISTAKES

MODULES = (window, compressor, indexer, candidates, sparse_attention, attention, engram, model, sampling)
FAULT_BY_ID = {fault.id: fault for fault in FAULTS}


@cache
def cases() -> Mapping[str, Case]:
    return {case.id: case for module in MODULES for case in module.cases()}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def prepared() -> Sequence[PreparedCase]:
    """Every vector with the answers of the plain reference, which passes."""
    return [PreparedCase(case, InProcess(Reference())) for case in cases().values()]


@pytest.mark.parametrize("variant", HONEST_VARIANTS, ids=lambda variant: variant.name)
def test_honest_variants_pass_every_vector(variant: HonestVariant) -> None:
    chosen = [ready for ready in prepared() if applies(variant, ready.case)]
    with variant.session() as session:
        answers = [ready.ask(session) for ready in chosen]
    # What the variant leaves as it was has been judged already.
    changed = [(ready, given) for ready, given in zip(chosen, answers, strict=True) if not same(given, ready.answers)]
    results = [ready.judge(given, to_the_end=True) for ready, given in changed]
    wrong = [(r.case.id, r.status, r.message, r.first_failure) for r in results if r.status != "PASS"]
    assert not wrong


@pytest.mark.parametrize(
    ("case_id", "fault"),
    [(case_id, fault) for case_id, faults in CAUGHT for fault in faults],
)
def test_vector_rejects_the_fault_it_is_for(case_id: str, fault: str) -> None:
    with FAULT_BY_ID[fault].applied():
        result = run_case(cases()[case_id], InProcess(Reference()))
    assert result.status in ("FAIL", "CRASH"), result.message


@pytest.mark.parametrize(("case_id", "edit"), MISTAKES, ids=str)
def test_vector_rejects_a_mistake_outside_the_catalogue(case_id: str, edit: Edit) -> None:
    with patched([edit]):
        result = run_case(cases()[case_id], InProcess(Reference()))
    assert result.status in ("FAIL", "CRASH"), result.message


def test_every_vector_rejects_something() -> None:
    assert set(cases()) == {case_id for case_id, _ in (*CAUGHT, *MISTAKES)}


def test_every_flag_is_defined() -> None:
    known = load_flags()
    assert [(case.id, flag) for case in cases().values() for flag in case.flags if flag not in known] == []
    assert all(case.flags for case in cases().values())


def test_released_moduli_add_up_to_the_tables_rows() -> None:
    assert {layer: int(primes.sum()) for layer, primes in engram.PRIMES.items()} == engram.ROW_TOTALS


def test_look_backs_reach_products_beyond_32_bits_and_doubles() -> None:
    largest = max(max(factors) for factors in engram.MULTIPLIERS.values())
    assert engram.token_map().max() == engram.token_map()[engram.LARGEST_ID_TOKEN] == engram.COMPRESSED - 1
    assert (engram.COMPRESSED - 1) * largest > 2**62
    assert engram.token_map()[engram.PAD_TOKEN] != engram.PAD_TOKEN


class _Shortfall(Reference):
    """Answers a shortfall of candidates in one of three ways."""

    def __init__(self, filling: str) -> None:
        super().__init__()
        self.filling = filling

    def select_positions(self, config: Config, layer_id: int, scores: Array, positions: Array) -> Array:
        rows = np.full((*scores.shape[:2], 4), -1)
        for query in range(scores.shape[1]):
            inside = np.flatnonzero(np.isfinite(scores[0, query].float().numpy())).tolist()
            visible = int(positions[0, query]) + 1
            others = [p for p in range(visible) if p not in inside]
            if self.filling == "invisible":
                others = [visible, *others]
            filled = sorted((inside + others)[:4]) if self.filling != "none" else inside
            rows[0, query, : len(filled)] = filled
        return torch.from_numpy(rows).to(torch.int32)


@pytest.mark.parametrize(("filling", "status"), [("none", "PASS"), ("visible", "PASS"), ("invisible", "FAIL")])
def test_candidate_shortfall_accepts_both_behaviours_and_no_third(filling: str, status: str) -> None:
    case = cases()["indexer/select/candidate-shortfall"]
    assert run_case(case, InProcess(_Shortfall(filling))).status == status
