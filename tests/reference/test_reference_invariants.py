"""What must hold for any configuration: chunks, batches, runtimes, readings.

The float64 arithmetic leaves no room for a sum's order, so results are compared exactly after each rounding point.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from reference.config import Config
from reference.indexer import index_scores
from reference.model import Model
from reference.runtime import Reading, Runtime

Weights = dict[str, torch.Tensor]
Taps = dict[str, torch.Tensor]
LENGTH = 19


def make_model(
    config: Config,
    weights: Weights,
    token_map: torch.Tensor,
    batch_size: int = 1,
    reading: Reading = "intended",
    compute: torch.dtype = torch.float64,
) -> Model:
    runtime = Runtime(config, batch_size, reading, ties="earliest")
    return Model(config, weights, runtime, token_map, batch_size, compute=compute)


def prompt(config: Config, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (1, length), generator=generator).to(torch.int32)


def image_of(config: Config, length: int, first: int = 6, count: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.zeros(1, length, dtype=torch.bool)
    mask[:, first : first + count] = True
    features = torch.randn(1, length, config.dim, generator=torch.Generator().manual_seed(3)).bfloat16()
    return mask, features


def run(
    model: Model,
    ids: torch.Tensor,
    lengths: Sequence[int],
    image: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> list[Taps]:
    calls, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        mask, features = (None, None) if image is None else (image[0][:, part], image[1][:, part])
        calls.append(model.step(ids[:, part], torch.tensor([start]), mask, features, all_positions=True))
        start += length
    return calls


def assert_same_state(config: Config, left: Model, right: Model, length: int) -> None:
    """Equal state; of a carry only the slots of the unfinished group count, the others hold old values."""
    right_state = right.state()
    for name, tensor in left.state().items():
        other = right_state[name]
        if "carry" in name:
            waiting = length % config.ratio(int(name.split("/")[0].removeprefix("layer")))
            torch.testing.assert_close(tensor[:, :waiting], other[:, :waiting], rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(tensor, other), name


def joined(calls: Sequence[Taps], name: str) -> torch.Tensor:
    return torch.cat([call[name] for call in calls if name in call], dim=1)


def assert_same_rows(calls: Sequence[Taps], whole: Sequence[Taps]) -> None:
    """Every tap that has a row a token or a compressed row, however the calls are cut."""
    width_varies = ("attn_list", "window_slots", "selected", "index_score", "candidates", "gate_")
    names = {name for call in [*calls, *whole] for name in call if not any(part in name for part in width_varies)}
    for name in sorted(names - {"output_ids"}):
        left, right = joined(calls, name), joined(whole, name)
        if "index_" in name:
            # Nothing is queried in a call before whose end there is no compressed row.
            right = right[:, -left.shape[1] :]
        if left.is_floating_point() and left.dtype != torch.bfloat16:
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12, msg=name)
        else:
            assert torch.equal(left, right), name


@pytest.mark.parametrize("split", range(1, LENGTH))
def test_two_chunks_are_one_prefill(config: Config, weights: Weights, token_map: torch.Tensor, split: int) -> None:
    ids = prompt(config, LENGTH)
    whole, chunked = make_model(config, weights, token_map), make_model(config, weights, token_map)
    expected = run(whole, ids, [LENGTH])
    assert_same_rows(run(chunked, ids, [split, LENGTH - split]), expected)
    assert_same_state(config, chunked, whole, LENGTH)


@pytest.mark.parametrize("seed", range(10))
def test_any_chunks_are_one_prefill(config: Config, weights: Weights, token_map: torch.Tensor, seed: int) -> None:
    choose = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < LENGTH:
        lengths.append(choose.randint(1, min(7, LENGTH - sum(lengths))))
    ids, image = prompt(config, LENGTH, seed=1), image_of(config, LENGTH)
    whole, chunked = make_model(config, weights, token_map), make_model(config, weights, token_map)
    expected = run(whole, ids, [LENGTH], image)
    assert_same_rows(run(chunked, ids, lengths, image), expected)
    assert_same_state(config, chunked, whole, LENGTH)


def test_token_by_token_is_one_chunk_beyond_one_list_block(
    config: Config, weights: Weights, token_map: torch.Tensor
) -> None:
    """A continuing call lists its rows as one-token steps do, which fixes the 64-wide blocks of the list."""
    config = replace(config, window_size=67, index_topk=9)
    ids = prompt(config, 85)
    chunk, steps = make_model(config, weights, token_map), make_model(config, weights, token_map)
    assert_same_rows(run(chunk, ids, [60, 25])[1:], run(steps, ids, [60] + [1] * 25)[1:])
    assert_same_state(config, chunk, steps, 85)
    for name, tensor in chunk.state().items():
        if "carry" in name:
            torch.testing.assert_close(tensor, steps.state()[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reading", ["intended", "literal"])
def test_batch_is_one_by_one_at_different_positions(
    config: Config, weights: Weights, token_map: torch.Tensor, reading: Reading
) -> None:
    calls = [(6, [0, 0, 0]), (3, [6, 0, 6]), (4, [9, 3, 0]), (1, [13, 7, 4]), (1, [14, 8, 5]), (2, [15, 9, 6])]
    ids = torch.cat([prompt(config, sum(length for length, _ in calls), seed) for seed in range(3)])
    batch = make_model(config, weights, token_map, batch_size=3, reading=reading)
    alone = [make_model(config, weights, token_map, reading=reading) for _ in range(3)]
    first = 0
    for length, starts in calls:
        part = slice(first, first + length)
        first += length
        together = batch.step(ids[:, part], torch.tensor(starts))
        for request, start in enumerate(starts):
            single = alone[request].step(ids[request : request + 1, part], torch.tensor([start]))
            for name, expected in single.items():
                rows = len(together[name]) // 3
                got = together[name][request * rows : (request + 1) * rows]
                if got.shape != expected.shape:
                    got = got[tuple(slice(0, size) for size in expected.shape)]
                if expected.is_floating_point() and expected.dtype != torch.bfloat16:
                    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12, msg=name)
                else:
                    assert torch.equal(got, expected), (name, request, start)


def test_interleaved_runtimes_do_not_meet(config: Config, weights: Weights, token_map: torch.Tensor) -> None:
    def model(_: int) -> Model:
        return make_model(config, weights, token_map, reading="literal", compute=torch.float32)

    lengths = [[7, 1, 1, 1, 2], [4, 1, 3, 1, 1]]
    ids = [prompt(config, sum(of_one), seed) for seed, of_one in enumerate(lengths)]
    separate = [run(model(one), ids[one], lengths[one]) for one in range(2)]
    models, starts = [model(one) for one in range(2)], [0, 0]
    for call in range(5):
        for one in range(2):
            length = lengths[one][call]
            part = slice(starts[one], starts[one] + length)
            taps = models[one].step(ids[one][:, part], torch.tensor([starts[one]]), all_positions=True)
            starts[one] += length
            for name, tensor in separate[one][call].items():
                assert torch.equal(taps[name], tensor), name


def test_readings_differ_where_a_group_is_incomplete(config: Config, weights: Weights, token_map: torch.Tensor) -> None:
    ids, lengths = prompt(config, 9), [8, 1]
    intended = run(make_model(config, weights, token_map), ids, lengths)
    literal = run(make_model(config, weights, token_map, reading="literal"), ids, lengths)
    for name, tensor in intended[0].items():
        assert torch.equal(tensor, literal[0][name]), "a prefill that completes groups has no stale keys"
    assert torch.equal(intended[1]["layer1/index_q"], literal[1]["layer1/index_q"])
    assert not torch.equal(intended[1]["layer1/index_score"], literal[1]["layer1/index_score"])
    # Position 8 completes no group of layer 1, which then sees the keys that layer 5 published in the call before.
    keys = literal[0]["layer5/index_keys"][:, :4]
    scores = index_scores(
        config,
        1,
        literal[1]["layer1/index_q"],
        literal[1]["layer1/index_weights"],
        keys,
        torch.tensor([[8]]),
        None,
        compute=torch.float64,
    )
    assert torch.equal(literal[1]["layer1/index_score"], scores)


def test_float64_is_close_and_not_equal(config: Config, weights: Weights, token_map: torch.Tensor) -> None:
    ids = prompt(config, 7)
    single = run(make_model(config, weights, token_map, compute=torch.float32), ids, [7])[0]
    double = run(make_model(config, weights, token_map), ids, [7])[0]
    for name in ("attn_pre", "attn_post", "attn_comb"):
        left, right = single[f"layer0/{name}"], double[f"layer0/{name}"]
        assert right.dtype == torch.float64
        assert not torch.equal(left.double(), right)
        torch.testing.assert_close(left.double(), right, rtol=1e-5, atol=1e-6)
    left, right = single["layer0/h_out"].double(), double["layer0/h_out"].double()
    assert (left - right).norm() < 1e-2 * right.norm()


def test_taps_can_be_left_out(config: Config, weights: Weights, token_map: torch.Tensor) -> None:
    ids = prompt(config, 5)
    full = make_model(config, weights, token_map).step(ids, torch.tensor([0]))
    few = make_model(config, weights, token_map).step(ids, torch.tensor([0]), all_taps=False)
    assert not any(name.startswith("layer") for name in few)
    for name, tensor in few.items():
        assert torch.equal(tensor, full[name]), name
