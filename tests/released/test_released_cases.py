"""Cases at the released widths: the cheap ones run, the rules of the others must be able to fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.cases import released
from conformance.cases.case import Advance, Call, Case, Open, ReadState, Request
from conformance.cases.catalogue import catalogue
from conformance.cases.model import released_configuration
from conformance.cases.released_attention import Recording
from conformance.cases.released_set import Released
from conformance.cases.released_small import bytes_per_token, row_bytes
from conformance.config import ModelConfig
from conformance.errors import FixtureError
from conformance.fixtures import NOISE_FLOOR, Fixtures
from conformance.interface import Array, Config, Weights
from conformance.judge.components import indexer
from conformance.judge.noise import Distance, UnitFloors, read
from conformance.judge.own_scores import SCORE_AXES, DistantScores, OwnCandidates, OwnSelection, SameSelection
from conformance.judge.propagated import Propagated
from conformance.judge.rows import OfRows
from conformance.lazy import LazyTensors
from conformance.runner import run_case
from conformance.selection import Selection, select
from conformance.tensors import Tensor

SLOW = {"moe/384-experts-with-image-tokens/released-width", "engram/write/released-width"}


def all_cases() -> list[Case]:
    return list(released.cases(Fixtures.open(verify=False).recipe("released"), UnitFloors()))


def quick_cases() -> list[Case]:
    return [case for case in all_cases() if case.mode != "propagated" and case.id not in SLOW]


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    whole = Released(Fixtures.open(verify=False).recipe("released"))
    return [Recording(whole, "attention"), Recording(whole, "attention_short")]


@pytest.mark.parametrize("case", quick_cases(), ids=lambda case: case.id)
def test_reference_conforms(case: Case) -> None:
    result = run_case(case, InProcess(Reference()))
    assert result.status == "PASS", result.message or result.first_failure


class Zeros(InProcess):
    """Answers everything with zeros."""

    def ask(self, request: Request) -> Mapping[str, Tensor]:
        return {tap: Tensor(t.dtype, np.zeros_like(t.data)) for tap, t in super().ask(request).items()}


@pytest.mark.parametrize(
    "case",
    [case for case in quick_cases() if case.component not in ("attention", "quantize")],
    ids=lambda case: case.id,
)
def test_zeros_fail(case: Case) -> None:
    """Attention's own cases take long; the bytes of a quantiser's results say nothing of their values."""
    assert run_case(case, Zeros(Reference())).status == "FAIL"


def test_noise_floors_of_both_recordings_are_stored() -> None:
    fixtures = Fixtures.open(verify=False)
    stored = read(fixtures.directory / NOISE_FLOOR, fixtures.lock_hash)["released"]
    for case in all_cases():
        if case.mode == "propagated":
            assert set(stored[case.id]) == {"attn_out", "index_score"}


class Unpacked(Reference):
    """Keeps FP4 codes one a byte."""

    def quantize_fp4_e4m3(self, x: Array) -> tuple[Array, Array]:
        codes, scales = super().quantize_fp4_e4m3(x)
        return torch.cat((codes & 15, codes >> 4), -1), scales


class BinaryAngles(Reference):
    """Multiplies position and frequency in double precision."""

    def rotary_tables(self, config: Config, layer_id: int, positions: Array) -> tuple[Array, Array]:
        angles = positions.double()[:, None] * self.rotary_frequencies(config, layer_id).double()
        return angles.cos().float(), angles.sin().float()


class TextBias(Reference):
    """Routes image tokens with the text bias."""

    def gate(self, config: Config, weights: Weights, x: Array, image_mask: Array | None) -> tuple[Array, Array]:
        return super().gate(config, weights, x, None)


class GroupsExchanged(Reference):
    """Gives heads to the wrong group of the output projection."""

    def attention_output(self, config: Config, layer_id: int, weights: Weights, o: Array, positions: Array) -> Array:
        return super().attention_output(config, layer_id, weights, o.roll(1, dims=2), positions)


class LastBlockLost(Reference):
    """Attends to whole blocks of 64 only."""

    def sparse_attention(self, q: Array, kv: Array, indices: Array, sink: Array, scale: float) -> Array:
        return super().sparse_attention(q, kv, indices[..., : indices.shape[-1] // 64 * 64], sink, scale)


@pytest.mark.parametrize(
    ("port", "case_id"),
    [
        (Unpacked, "quantize/packed-bytes-per-token/released"),
        (BinaryAngles, "rotary/tables-up-to-a-million/released-window"),
        (BinaryAngles, "rotary/tables-up-to-a-million/released-compressed"),
        (TextBias, "gate/six-of-384-with-image-bias/released-width"),
        (GroupsExchanged, "attention/output-turned-back-and-grouped/released-width"),
        (LastBlockLost, "sparse_attention/lists-longer-than-a-block/released-width"),
    ],
)
def test_mistakes_fail(port: type[Reference], case_id: str) -> None:
    case = next(case for case in all_cases() if case.id == case_id)
    assert run_case(case, InProcess(port())).status == "FAIL"


def test_memory_of_a_token() -> None:
    config = ModelConfig.from_mapping(released_configuration(), "released")
    assert row_bytes(config) == {"quantize_fp4_e4m3": 288, "quantize_fp4_e8m0": 68, "quantize_fp8": 528}
    assert bytes_per_token(config) == 890


def test_naming_a_set_selects_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from conformance import check, cli

    seen: list[Selection] = []
    monkeypatch.setattr(check, "check", lambda options: seen.append(options.selection) or 0)
    for arguments in ([], ["--set", "released"], ["--set", "released", "--level", "core"]):
        cli.app(["check", "reference", *arguments], standalone_mode=False)
    assert [(selection.set_name, selection.level) for selection in seen] == [
        (None, "core"),
        ("released", "full"),
        ("released", "core"),
    ]


def test_cases_that_take_seconds_are_left_out_of_a_plain_run() -> None:
    cases = catalogue(Fixtures.open(verify=False))
    chosen = {case.id for case in select(cases, Selection("full", set_name="released"))}
    assert chosen >= {case.id for case in all_cases()} | {"model/parameter-counts/released"}
    core = {case.id for case in select(cases, Selection("core"))}
    assert SLOW.isdisjoint(core)
    assert not any("at-released-widths" in case_id for case_id in core)
    assert "engram/hash/released-vocabulary-text" in core


def test_attention_steps_every_layer_of_every_call(recordings: list[Recording]) -> None:
    case = next(case for case in all_cases() if case.id.endswith("ring-still-filling-prefill-61-then-3"))
    requests = [step.request for step in case.steps()]
    assert [type(request) for request in requests] == [Open] * 6 + [Advance] * 20 + [ReadState] * 5
    assert recordings[0].starts == (0, 272, 273, 274)
    assert recordings[1].mapping["candidate_topk_blocks"] == 24
    assert case.reading == "intended"


def test_damaged_metadata_is_one_line(recordings: list[Recording], monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(recordings[0].released, "attention")
    monkeypatch.setitem(recording.file.header.metadata, "rows", "all")  # type: ignore[arg-type]
    with pytest.raises(FixtureError, match=r"attention\.safetensors: metadata rows"):
        _ = recording.queried


def own_rules(recording: Recording, layer: int, call: int) -> tuple[OwnSelection, dict[str, Tensor]]:
    recorded = {tap: recording.recorded(call, layer, tap) for tap in ("selected", "index_score")}
    positions = recording.queried[call][None]
    visible = indexer.visibility(recording.config, layer, positions, recorded["index_score"].shape[-1])
    return OwnSelection(visible, recording.config.index_topk, recorded), recorded


def test_recorded_selections_are_those_of_their_scores(recordings: list[Recording]) -> None:
    for recording in recordings:
        for layer in (2, 20, 24):
            for call in range(4):
                rule, recorded = own_rules(recording, layer, call)
                assert rule.judge(recorded).passed, (recording.stem, layer, call)


def test_recorded_candidates_are_those_of_their_scores(recordings: list[Recording]) -> None:
    recording = recordings[0]
    config = recording.config
    for call in range(4):
        recorded = {tap: recording.recorded(call, 20, tap) for tap in ("candidates", "index_score")}
        counts = indexer.visible_counts(config, 20, recording.queried[call][None])
        columns = recorded["index_score"].shape[-1]
        rule = OwnCandidates(counts, columns, config.candidate_block_size, config.candidate_topk_blocks, recorded)
        assert rule.judge(recorded).passed
        everything = Tensor("BOOL", np.ones_like(recorded["candidates"].data))
        assert not rule.judge({**recorded, "candidates": everything}).passed


def test_selections_of_other_scores_fail(recordings: list[Recording]) -> None:
    rule, recorded = own_rules(recordings[0], 20, 1)
    scores = recorded["index_score"]
    worst = Tensor("BF16", scores.data ^ np.uint16(0x8000))
    assert not rule.judge({**recorded, "index_score": worst}).passed
    assert not rule.judge({**recorded, "index_score": scores[:, :, :-1]}).passed


def near(tap: str, recorded: Tensor) -> Propagated:
    return Propagated(tap, recorded, Distance(0.02, 0.02, 0.02), "a test", SCORE_AXES)


def test_scores_are_judged_where_both_see_something(recordings: list[Recording]) -> None:
    recorded = recordings[0].recorded(0, 24, "index_score")
    masked = np.isneginf(recorded.values())
    assert masked.any()
    exactly = DistantScores(near("index_score", recorded), np.ones_like(masked))
    loosely = DistantScores(near("index_score", recorded), np.zeros_like(masked))
    assert exactly.judge({"index_score": recorded}).passed
    other = recorded.data.copy()
    other[0, -1, np.flatnonzero(~masked[0, -1])[0]] = 0xFF80  # -inf
    assert not exactly.judge({"index_score": Tensor("BF16", other)}).passed
    assert loosely.judge({"index_score": Tensor("BF16", other)}).passed
    scaled = Tensor.from_values(np.where(masked, -np.inf, recorded.values() * 1.05), "BF16")
    assert not loosely.judge({"index_score": scaled}).passed
    assert not loosely.judge({"index_score": recorded[:, 1:]}).passed


def test_outputs_are_judged_closely_where_the_selection_is_the_recorded_one(recordings: list[Recording]) -> None:
    recording = recordings[0]
    out, selected = (recording.recorded(0, 20, tap) for tap in ("attn_out", "selected"))
    rule = SameSelection(near("attn_out", out), selected)
    changed = out.data.copy()
    changed[:, -1] = 0
    zeroed = Tensor("BF16", changed)
    assert rule.judge(rule.golden).passed
    assert not rule.judge({"attn_out": zeroed, "selected": selected}).passed
    other = selected.data.copy()
    other[0, -1, 0] += 1
    assert rule.judge({"attn_out": zeroed, "selected": Tensor("I32", other)}).passed
    assert not rule.judge({"attn_out": zeroed, "selected": selected[:, 1:]}).passed


def test_rows_are_picked_and_recordings_spread() -> None:
    recorded = Tensor.from_values(np.arange(6.0).reshape(1, 2, 3), "BF16")
    rule = OfRows(near("attn_out", recorded), [1, 3], 4)
    full = rule.golden["attn_out"]
    assert full.shape == (1, 4, 3)
    assert full[:, [1, 3]].equal_bits(recorded)
    assert rule.judge(rule.golden).passed
    assert rule.judge({"attn_out": recorded}).message.startswith("wrong shape [1, 2, 3], expected 4 positions")
    assert not rule.judge({"attn_out": Tensor("BF16", np.zeros_like(full.data))}).passed


class Counting(LazyTensors):
    def __init__(self) -> None:
        self.made: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.made.append(name)
        return Tensor("F32", np.zeros(2, np.float32))

    def __contains__(self, name: object) -> bool:
        return name in ("a", "b")

    def __iter__(self) -> Any:
        return iter(["a", "b"])

    def __len__(self) -> int:
        return 2

    def rows(self, name: str, rows: Any) -> Tensor:
        raise AssertionError(name)


def test_weights_are_converted_when_looked_up_and_dropped_with_the_case() -> None:
    seen: list[Mapping[str, Any]] = []

    class Looks(Reference):
        def gate(self, config: Config, weights: Weights, x: Array, image_mask: Array | None) -> tuple[Array, Array]:
            seen.append(weights)
            weights["b"]
            weights["b"]
            return x, x

    lazy, session = Counting(), InProcess(Looks())
    x = Tensor("F32", np.zeros((1, 1), np.float32))
    arguments = {"config": {}, "weights": lazy, "x": x, "image_mask": None}
    for _ in range(2):
        session.ask(Call("gate", arguments))
    assert lazy.made == ["b"]
    assert seen[0] is seen[1]
    session.reset()
    session.ask(Call("gate", arguments))
    assert lazy.made == ["b", "b"]
