"""Hand-made vectors of `dspark`: requests that stand at different places, slots that hold rubbish, ties broken late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from conformance.cases.case import Call, Case, Step
from conformance.cases.draft_view import drafts_config
from conformance.cases.traces import exact, int64
from conformance.cases.vectors import weights as made
from conformance.cases.vectors.configuration import CONFIG
from conformance.config import ModelConfig
from conformance.formats import BF16
from conformance.judge.bounded import Bounded, concatenate
from conformance.judge.components import dspark as rules_of
from conformance.judge.components.hyper_connections import read
from conformance.judge.components.linear import Parameters
from conformance.judge.expectations import Exact, Expectation, Within
from conformance.judge.own_drafts import AfterOwnDrafts, OwnDrafts
from conformance.tensors import Tensor

BLOCK_SIZE, RANK = 5, 32
DRAFTING: Mapping[str, Any] = {
    **CONFIG,
    "n_mtp_layers": 2,
    "compress_ratios": [*CONFIG["compress_ratios"], 0, 0],
    "dspark_block_size": BLOCK_SIZE,
    "dspark_noise_token_id": CONFIG["vocab_size"] - 1,
    "dspark_target_layer_ids": [6, 2, 7],
    "dspark_markov_rank": RANK,
    "dspark_n_routed_experts": 4,
    "dspark_n_activated_experts": 1,
}
"""The small model with two draft blocks of five drafts; its target layers do not ascend."""
MODEL = ModelConfig.from_mapping(DRAFTING, "conformance/cases/vectors/dspark.py")
STARTS = (3, 8, 9, 1_000_000)
"""First draft positions: a ring of 8 slots partly filled, just filled, wrapped, and far on."""
RUBBISH = 2.0**12


def cases() -> Iterator[Case]:
    """All vectors of the component."""
    yield Case(
        "dspark/hidden-states-enter-target-layers/not-ascending",
        "core",
        "composed",
        "Fails when target layers are sorted, or are not the ones that are named.",
        "numerics.md 10",
        _targets,
        flags=("draft-target-layers", "draft-target-order", "draft-target-output", "draft-streams-mean"),
        source="hand-made",
    )
    yield Case(
        "dspark/newest-token-then-noise/batch-of-4",
        "core",
        "exact",
        "Fails when all requests of a batch begin with the first one's token.",
        "numerics.md 10",
        _embedding,
        flags=("draft-first-token", "draft-noise-token"),
        source="hand-made",
    )
    yield Case(
        "dspark/drafts-see-ring-and-all-drafts/rubbish-in-unwritten-slots",
        "core",
        "composed",
        "Fails when slots that were never written are read, or requests are taken to stand at one position.",
        "numerics.md 10",
        _attention,
        flags=("draft-ring-range", "draft-position-off", "draft-causal", "draft-rows-unseen", "draft-ring-unseen"),
        source="hand-made",
    )
    yield Case(
        "dspark/drafts-follow-one-another/bias-decides",
        "core",
        "composed",
        "Fails when a draft is not chosen by the bias of the draft right before it.",
        "numerics.md 10",
        _tokens,
        flags=("draft-markov-missing", "draft-markov-first-token", "draft-markov-late", "draft-ids-shifted"),
        source="hand-made",
    )


def _targets() -> Iterator[Step]:
    residuals = made.bf16("dspark.residuals", 2, 3, MODEL.n_layers, MODEL.hc_mult, MODEL.dim)

    def rules() -> list[Expectation]:
        expected = rules_of.main_hidden(MODEL, exact(residuals))
        return [Within("main_hidden", expected, "BF16", ("request", "position", "feature"))]

    yield Step(Call("main_hidden", {"config": DRAFTING, "residuals": residuals}), rules)


def _embedding() -> Iterator[Step]:
    weight = made.bf16("dspark.embed", MODEL.vocab_size, MODEL.dim)
    newest = np.array([5, 0, MODEL.vocab_size - 1, 64])
    ids = np.full((newest.size, BLOCK_SIZE), MODEL.dspark_noise_token_id)
    ids[:, 0] = newest
    arguments = {"config": DRAFTING, "weight": weight, "output_ids": Tensor("I32", newest.astype(np.int32))}
    rules = [Exact("embed", weight[ids], ("request", "position", "feature"))]
    yield Step(Call("draft_embedding", arguments), lambda: rules)


def _attention() -> Iterator[Step]:
    """Each request has its own position; what is not written holds large numbers."""
    config = drafts_config(MODEL)
    weights = made.parameters(made.attention(config, 0))
    batch = len(STARTS)
    x = made.bf16("dspark.x", batch, BLOCK_SIZE, MODEL.dim)
    ring = made.bf16("dspark.ring", batch, MODEL.window_size, MODEL.head_dim).values()
    written = np.arange(MODEL.window_size) < np.array(STARTS)[:, None]
    kept = Tensor.from_values(np.where(written[..., None], ring, RUBBISH), "BF16")
    arguments = {
        "config": DRAFTING,
        "layer_id": MODEL.n_layers,
        "weights": weights.mapping(),
        "x": x,
        "ring": kept,
        "start_pos": int64(STARTS),
    }

    def rules() -> list[Expectation]:
        parts: list[Bounded] = []
        for request, start in enumerate(STARTS):
            one = slice(request, request + 1)
            _, o = rules_of.draft_heads(config, 0, weights, exact(x[one]), exact(kept[one]), start)
            parts.append(rules_of.draft_output(config, 0, weights, o.rounded(BF16), start))
        return [Within("attn_out", concatenate(parts, 0), "BF16", ("request", "position", "feature"))]

    yield Step(Call("draft_attention", arguments), rules)


def _tokens() -> Iterator[Step]:
    """The hidden states say little, the Markov head much: each draft follows from the one before it alone."""
    scale = 2.0**6
    markov = made.matrix("markov_head.head", MODEL.vocab_size, RANK, "F32")["markov_head.head.weight"]
    tensors = {
        **made.norm("norm", MODEL.dim),
        "markov_head.embed.weight": made.bf16("markov_head.embed", MODEL.vocab_size, RANK),
        "markov_head.head.weight": Tensor.from_values(markov.values() * scale, "F32"),
        **made.matrix("confidence_head.proj", 1, MODEL.dim + RANK, "F32"),
    }
    weights, batch = made.parameters(tensors), 3
    head = made.matrix("head", MODEL.vocab_size, MODEL.dim, "BF16")["head.weight"]
    h = made.bf16("dspark.h", batch, BLOCK_SIZE, MODEL.hc_mult, MODEL.dim)
    pre = Tensor.from_values(np.abs(made.normal("dspark.pre", batch, BLOCK_SIZE, MODEL.hc_mult)), "F32")
    first = np.array([7, 100, 7])
    arguments = {
        "config": DRAFTING,
        "weights": weights.mapping(),
        "head_weight": head,
        "h": h,
        "pre": pre,
        "output_ids": Tensor("I32", first.astype(np.int32)),
    }
    yield Step(Call("draft_tokens", arguments), partial(_token_rules, weights, head, h, pre, first))


def _token_rules(weights: Parameters, head: Tensor, h: Tensor, pre: Tensor, first: rules_of.Ints) -> list[Expectation]:
    hidden = read(exact(h), exact(pre)).rounded(BF16)
    base = rules_of.base_logits(MODEL, weights, head.values(), hidden)
    axes = ("request", "draft", "token id")

    def logits(previous: rules_of.Ints, _: Mapping[str, Tensor]) -> Within:
        return Within("spec_logits", base + rules_of.markov_bias(weights, previous), "F32", axes)

    def confidence(previous: rules_of.Ints, _: Mapping[str, Tensor]) -> Within:
        return Within("spec_confidence", rules_of.confidence(weights, hidden, previous), "F32", axes[:2])

    shared = (first, BLOCK_SIZE, MODEL.vocab_size)
    return [
        OwnDrafts(*shared),
        AfterOwnDrafts("spec_logits", "composed", *shared, logits),
        AfterOwnDrafts("spec_confidence", "composed", *shared, confidence),
    ]
