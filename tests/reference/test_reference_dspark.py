"""The draft head against the golden set, and rejected drafts that leave no trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from reference_configurations import SMALL, make_weights
from safetensors.torch import load_file

from reference.config import Config
from reference.dspark import DSpark, draft_indices
from reference.model import Model
from reference.runtime import Runtime

TINY = Path(__file__).parents[2] / "fixtures" / "tiny"
DRAFTS = 3
LENGTH = 24
PROMPT = 7
Tensors = dict[str, torch.Tensor]
CONFIG = Config.from_mapping(SMALL)
WEIGHTS = make_weights(CONFIG, seed=7)
TOKEN_MAP = (torch.arange(CONFIG.vocab_size) // 2).to(torch.int32)


@pytest.fixture(scope="module")
def golden() -> Tensors:
    return load_file(TINY / "dspark-from-14.safetensors")


@pytest.fixture(scope="module")
def tiny() -> Config:
    return Config.from_mapping(json.loads((TINY / "config.json").read_text()))


@pytest.fixture(scope="module")
def tiny_weights() -> Tensors:
    return load_file(TINY / "weights.safetensors")


def test_golden_drafts(tiny: Config, tiny_weights: Tensors, golden: Tensors) -> None:
    """Everything recorded of the draft head, from the hidden states of the model on."""
    head = DSpark(tiny, tiny_weights, 1)
    seen = set()
    for call, start in enumerate((0, 14, 15, 16, 17, 18)):
        taps = head.step(golden[f"call{call}/main_hidden"], golden[f"call{call}/output_ids"], torch.tensor([start]))
        for name, got in taps.items():
            recorded = golden.get(f"call{call}/{name}")
            if recorded is not None:
                seen.add(name)
                # Far above a sum's order, far below the step of an FP8 code.
                torch.testing.assert_close(
                    got.reshape(recorded.shape), recorded, rtol=0, atol=1e-5, msg=f"{call} {name}"
                )
    for name, ring in head.state().items():
        assert torch.equal(ring, golden[f"state/{name}"]), name
    recorded_names = {name.split("/", 1)[1] for name in golden if "layer16/" in name and name.startswith("call1")}
    assert seen >= recorded_names | {"spec_ids", "spec_logits", "spec_confidence"}


def test_requests_of_a_batch_are_independent(tiny: Config, tiny_weights: Tensors, golden: Tensors) -> None:
    """Two requests at different positions give what each gives alone."""
    hidden = torch.cat([golden["call0/main_hidden"], golden["call0/main_hidden"].flip(1)])
    ids = torch.tensor([3, 7], dtype=torch.int32)
    together = DSpark(tiny, tiny_weights, 2, compute=torch.float64)
    together.step(hidden, ids, torch.tensor([0, 0]))
    both = together.step(hidden[:, :2], ids, torch.tensor([14, 14]))
    for request in range(2):
        one = slice(request, request + 1)
        alone = DSpark(tiny, tiny_weights, 1, compute=torch.float64)
        alone.step(hidden[one], ids[one], torch.tensor([0]))
        found = alone.step(hidden[one, :2], ids[one], torch.tensor([14]))
        for name in ("spec_ids", "spec_logits", "spec_confidence"):
            assert torch.equal(found[name], both[name][one]), name


@pytest.mark.parametrize(("start", "slots"), [(1, 1), (15, 15), (16, 16), (17, 16), (1000, 16)])
def test_drafts_list_what_is_written_and_one_another(tiny: Config, start: int, slots: int) -> None:
    listed = draft_indices(tiny, torch.tensor([start]))
    expected = {*range(slots), *range(tiny.window_size, tiny.window_size + tiny.dspark_block_size)}
    assert all(set(row.tolist()) - {-1} == expected for row in listed[0])


def decoder() -> Model:
    runtime = Runtime(CONFIG, 2, "intended", ties="earliest")
    return Model(CONFIG, WEIGHTS, runtime, TOKEN_MAP, 2, compute=torch.float64)


IDS = torch.randint(0, CONFIG.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(1)).to(torch.int32)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(0, DRAFTS), st.integers(0, DRAFTS)), min_size=1, max_size=4), st.randoms())
def test_rejected_drafts_leave_no_trace(accepted: list[tuple[int, int]], random) -> None:  # type: ignore[no-untyped-def]
    """Logits and state after any acceptance are those of a model that never saw a rejected token."""
    model = decoder()
    model.step(IDS[:, :PROMPT], torch.tensor([0, 0]), all_taps=False)
    position = torch.tensor([PROMPT, PROMPT])
    for counts in accepted:
        call = torch.stack([IDS[b, p : p + 1 + DRAFTS].clone() for b, p in enumerate(position.tolist())])
        for request, count in enumerate(counts):
            for draft in range(1 + count, 1 + DRAFTS):
                call[request, draft] = random.randrange(CONFIG.vocab_size)
        model.step(call, position, all_taps=False)
        position = position + 1 + torch.tensor(counts)
        model.roll_back(position)
    newest = torch.stack([IDS[b, p : p + 1] for b, p in enumerate(position.tolist())])
    found = model.step(newest, position, all_taps=False)["logits"]

    for request, end in enumerate(position.tolist()):
        plain = decoder()
        plain.step(IDS[:, :end], torch.tensor([0, 0]), all_taps=False)
        expected = plain.step(IDS[:, end : end + 1], torch.tensor([end, end]), all_taps=False)["logits"]
        assert torch.equal(found[request], expected[request])
        for name, tensor in plain.state().items():
            if "carry" not in name:
                # Rows beyond a request's own are zero in a batch with a longer one.
                own = model.state()[name][request, : tensor.shape[1]]
                assert torch.equal(own, tensor[request]), name


def test_only_tokens_of_the_last_call_can_be_taken_back() -> None:
    model = decoder()
    with pytest.raises(ValueError, match="no call"):
        model.roll_back(torch.tensor([0, 0]))
    model.step(IDS[:, :PROMPT], torch.tensor([0, 0]), all_taps=False)
    model.step(IDS[:, PROMPT : PROMPT + 2], torch.tensor([PROMPT, PROMPT]), all_taps=False)
    for end in (PROMPT - 1, PROMPT + 3):
        with pytest.raises(ValueError, match="last call"):
            model.roll_back(torch.tensor([end, PROMPT]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dspark_target_layer_ids": (13, 16)}, "dspark_target_layer_ids"),
        ({"dspark_target_layer_ids": ()}, "dspark_target_layer_ids"),
        ({"n_mtp_layers": 0}, "n_mtp_layers"),
        ({"dspark_n_activated_experts": 0}, "dspark_n_activated_experts"),
        ({"dspark_noise_token_id": 512}, "dspark_noise_token_id"),
    ],
)
def test_a_contradictory_draft_head_is_refused(tiny: Config, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(tiny, **change)  # type: ignore[arg-type]


def test_a_model_without_draft_head_is_refused(tiny: Config, tiny_weights: Tensors) -> None:
    with pytest.raises(ValueError, match="dspark_block_size"):
        DSpark(replace(tiny, dspark_block_size=0), tiny_weights, 1)
