"""DSpark, the draft head: its pieces, its blocks on what was recorded, and the whole from the model's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from conformance.cases.block import PER_STREAM, STREAM_AXES
from conformance.cases.case import Advance, Call, Case, Open, Place, ReadState, Step, no_rules
from conformance.cases.draft_view import Drafts, drafts_config
from conformance.cases.traces import GoldenModel, Ints, Trace, bf16, exact, int64
from conformance.formats import BF16
from conformance.judge.bounded import Bounded
from conformance.judge.components import dspark as rules_of
from conformance.judge.components.hyper_connections import coefficients, read
from conformance.judge.components.linear import Parameters
from conformance.judge.components.norm import rms_norm
from conformance.judge.expectations import Exact, Expectation, Mode, Within
from conformance.judge.noise import Floors
from conformance.judge.own_drafts import AfterOwnDrafts, OwnDrafts
from conformance.judge.propagated import Propagated
from conformance.tensors import Tensor

ROW_AXES = ("request", "position", "feature")
RING_AXES = ("request", "slot", "feature")
LOGIT_AXES = ("request", "position", "token id")
SPEC = "numerics.md 10"


def cases(model: GoldenModel, drafts: Sequence[Drafts], floors: Floors) -> Iterator[Case]:
    """What the draft head is given, its attention, its end, its blocks one by one, and all of it."""
    source = ", ".join(of.trace.source for of in drafts)
    for trace in model.traces:
        if trace.has("main_hidden"):
            yield Case(
                f"dspark/hidden-states-enter-target-layers/{trace.name}",
                "core",
                "composed",
                "Fails when other layers are tapped, in another order, at their output, or one stream instead of all.",
                SPEC,
                partial(_main_hidden, model, trace),
                flags=("draft-target-layers", "draft-target-order", "draft-target-output", "draft-streams-mean"),
                source=trace.source,
            )
    yield Case(
        "dspark/main-projection/trace",
        "smoke",
        "composed",
        "Fails when the projected hidden states are not normed, or each part is normed before.",
        SPEC,
        partial(_main_projection, model, drafts),
        flags=("draft-main-norm",),
        source=source,
    )
    yield Case(
        "dspark/newest-token-then-noise/trace",
        "smoke",
        "exact",
        "Fails when drafts begin with another token than the model's newest, or the rest is not noise.",
        SPEC,
        partial(_draft_embedding, model, drafts),
        flags=("draft-first-token", "draft-noise-token"),
        source=source,
    )
    yield Case(
        "dspark/drafts-see-ring-and-all-drafts/trace",
        "smoke",
        "composed",
        "Fails when drafts are causal, rotated at other positions, or do not see the ring as far as it is filled.",
        SPEC,
        partial(_draft_attention, model, drafts),
        flags=("draft-causal", "draft-position-off", "draft-ring-range", "draft-rows-unseen", "draft-ring-unseen"),
        source=source,
    )
    yield Case(
        "dspark/markov-bias/trace",
        "core",
        "composed",
        "Fails when the embedding of another token, or the model's own embedding or head is used.",
        SPEC,
        partial(_markov_bias, model, drafts),
        flags=("draft-markov-table", "draft-markov-in-bf16"),
        source=source,
    )
    yield Case(
        "dspark/confidence/trace",
        "core",
        "composed",
        "Fails when confidence is squashed, or its two parts are in the other order.",
        SPEC,
        partial(_confidence, model, drafts),
        flags=("draft-confidence-squashed", "draft-confidence-parts"),
        source=source,
    )
    yield Case(
        "dspark/drafts-follow-one-another/trace",
        "smoke",
        "composed",
        "Fails when the Markov bias is missing, is that of another draft, or confidence sees the normed hidden state.",
        SPEC,
        partial(_draft_tokens, model, drafts),
        flags=(
            "draft-markov-missing",
            "draft-markov-first-token",
            "draft-markov-late",
            "draft-confidence-normed",
            "draft-confidence-own-token",
            "draft-final-norm",
            "draft-ids-shifted",
        ),
        source=source,
    )
    case_id = "dspark/ring-seeded-by-the-model/trace"
    yield Case(
        case_id,
        "core",
        "propagated",
        "Fails when a ring is not seeded in prefill, keeps drafts, or experts are as many as in the model's layers.",
        SPEC,
        partial(_blocks, model, drafts, floors, case_id),
        flags=(
            "draft-ring-not-seeded",
            "draft-main-position",
            "draft-ring-range",
            "draft-ring-keeps-drafts",
            "draft-experts",
            "draft-position-off",
        ),
        source=source,
    )
    case_id = "dspark/free-running/trace"
    yield Case(
        case_id,
        "smoke",
        "propagated",
        "Fails when blocks are left out, get another input each, or the draft head has ends of its own.",
        SPEC,
        partial(_free_running, model, drafts, floors, case_id),
        flags=(
            "draft-blocks-left-out",
            "draft-main-x-per-block",
            "draft-head-own",
            "draft-ring-not-seeded",
            "draft-main-position",
            "draft-first-mix",
        ),
        source=source,
    )


def first_ids(trace: Trace, call: int) -> Ints:
    """The model's own newest tokens after a call, [B]."""
    return trace.scenario.tap(call, "output_ids").data.astype(np.int64)


def last_block(model: GoldenModel) -> Parameters:
    """Parameters of the last draft block, which hold the ends of the draft head."""
    return model.parameters.within(f"mtp.{model.config.n_mtp_layers - 1}.")


def _main_hidden(model: GoldenModel, trace: Trace) -> Iterator[Step]:
    known = [layer for layer in range(model.config.n_layers) if layer or trace.has("embed")]
    streams = {layer: trace.attention_stream(layer).data for layer in known}
    # A scenario that keeps few taps does not say what entered the first layer.
    unknown = np.zeros_like(streams[known[-1]])
    residuals = Tensor("BF16", np.stack([streams.get(i, unknown) for i in range(model.config.n_layers)], axis=2))

    def rules() -> list[Within]:
        expected = rules_of.main_hidden(model.config, exact(residuals))
        return [Within("main_hidden", expected, "BF16", ROW_AXES, recorded=trace.joined("main_hidden"))]

    yield Step(Call("main_hidden", {"config": model.mapping, "residuals": residuals}), rules, trace.place())


def _main_projection(model: GoldenModel, drafts: Sequence[Drafts]) -> Iterator[Step]:
    weights = model.parameters.within("mtp.0.")
    for of in drafts:
        hidden = of.trace.joined("main_hidden")
        arguments = {"config": model.mapping, "weights": weights.mapping(), "main_hidden": hidden}

        def rules(trace: Trace = of.trace, hidden: Tensor = hidden) -> list[Within]:
            expected = rules_of.main_projection(model.config, weights, exact(hidden))
            recorded = trace.joined("main_x", model.config.draft_layers[0])
            return [Within("main_x", expected, "BF16", ROW_AXES, recorded=recorded)]

        yield Step(Call("main_projection", arguments), rules, of.trace.place(model.config.n_layers))


def _draft_embedding(model: GoldenModel, drafts: Sequence[Drafts]) -> Iterator[Step]:
    for of in drafts:
        for call in range(len(of.trace.starts)):
            arguments = {
                "config": model.mapping,
                "weight": model.parameters.tensor("embed.weight"),
                "output_ids": of.trace.scenario.tap(call, "output_ids"),
            }
            rules = partial(_embedding_rules, of, call)
            yield Step(Call("draft_embedding", arguments), rules, of.place(None, call))


def _embedding_rules(of: Drafts, call: int) -> Sequence[Expectation]:
    return [Exact("embed", of.embedding(call), ROW_AXES)]


def ring(model: GoldenModel, trace: Trace, block: int, total: int) -> Bounded:
    """The ring of a draft block after `total` positions, of recorded main_x: [B,W,d]."""
    weights = model.parameters.within(f"mtp.{block}.attn.")
    main_x = trace.joined("main_x", model.config.draft_layers[block])[:, :total]
    return rules_of.ring(drafts_config(model.config), block, weights, exact(main_x))


def _draft_attention(model: GoldenModel, drafts: Sequence[Drafts]) -> Iterator[Step]:
    config = drafts_config(model.config)
    for block, layer in enumerate(model.config.draft_layers):
        weights = model.parameters.within(f"mtp.{block}.attn.")
        for of in drafts:
            for call in of.calls:
                x, first = of.tap("attn_in", block, call), of.first(call)
                kept = ring(model, of.trace, block, first)
                arguments = {
                    "config": model.mapping,
                    "layer_id": layer,
                    "weights": weights.mapping(),
                    "x": x,
                    "ring": bf16(kept),
                    "start_pos": int64(np.full(of.trace.batch, first)),
                }

                def rules(
                    weights: Parameters = weights,
                    block: int = block,
                    of: Drafts = of,
                    call: int = call,
                    x: Tensor = x,
                    kept: Bounded = kept,
                ) -> list[Within]:
                    first = of.first(call)
                    _, o = rules_of.draft_heads(config, block, weights, exact(x), kept, first)
                    expected = rules_of.draft_output(config, block, weights, o.rounded(BF16), first)
                    return [Within("attn_out", expected, "BF16", ROW_AXES, recorded=of.tap("attn_out", block, call))]

                yield Step(Call("draft_attention", arguments), rules, of.place(block, call))


def _previous(of: Drafts, call: int) -> Ints:
    """The token before each draft, [B,n]."""
    return of.trace.scenario.tap(call, "spec_ids").data[:, :-1].astype(np.int64)


def _markov_bias(model: GoldenModel, drafts: Sequence[Drafts]) -> Iterator[Step]:
    weights = last_block(model)
    for of in drafts:
        previous = np.concatenate([_previous(of, call).reshape(-1) for call in of.calls])
        arguments = {"weights": weights.mapping(), "previous_ids": Tensor("I32", previous.astype(np.int32))}

        def rules(previous: Ints = previous) -> list[Within]:
            return [Within("bias", rules_of.markov_bias(weights, previous), "F32", ("draft", "token id"))]

        yield Step(Call("markov_bias", arguments), rules)


def _hidden(model: GoldenModel, of: Drafts, call: int) -> Bounded:
    """The hidden state before the final norm, rounded: [B,n,D]."""
    block = model.config.n_mtp_layers - 1
    h, pre = of.tap("h_out", block, call), of.tap("pre_out", block, call)
    return read(exact(h), exact(pre)).rounded(BF16)


def _confidence(model: GoldenModel, drafts: Sequence[Drafts]) -> Iterator[Step]:
    weights = last_block(model)
    for of in drafts:
        for call in of.calls:
            hidden = bf16(_hidden(model, of, call)).reshape(-1, model.config.dim)
            previous = _previous(of, call).reshape(-1)
            arguments = {
                "weights": weights.mapping(),
                "hidden": hidden,
                "previous_ids": Tensor("I32", previous.astype(np.int32)),
            }

            def rules(hidden: Tensor = hidden, previous: Ints = previous) -> list[Within]:
                expected = rules_of.confidence(weights, exact(hidden), previous)
                return [Within("confidence", expected, "F32", ("draft",))]

            yield Step(Call("draft_confidence", arguments), rules, Place(None, [call]))


def _draft_tokens(model: GoldenModel, drafts: Sequence[Drafts]) -> Iterator[Step]:
    block = model.config.n_mtp_layers - 1
    for of in drafts:
        for call in of.calls:
            arguments = {
                "config": model.mapping,
                "weights": last_block(model).mapping(),
                "head_weight": model.parameters.tensor("head.weight"),
                "h": of.tap("h_out", block, call),
                "pre": of.tap("pre_out", block, call),
                "output_ids": of.trace.scenario.tap(call, "output_ids"),
            }
            yield Step(Call("draft_tokens", arguments), partial(_end_rules, model, of, call), of.place(None, call))


def _end_rules(model: GoldenModel, of: Drafts, call: int) -> Sequence[Expectation]:
    weights, hidden = last_block(model), _hidden(model, of, call)
    base = rules_of.base_logits(model.config, weights, model.parameters["head.weight"], hidden)

    def logits(previous: Ints, _: Mapping[str, Tensor]) -> Within:
        return Within("spec_logits", base + rules_of.markov_bias(weights, previous), "F32", LOGIT_AXES)

    def confidence(previous: Ints, _: Mapping[str, Tensor]) -> Within:
        return Within("spec_confidence", rules_of.confidence(weights, hidden, previous), "F32", LOGIT_AXES[:2])

    return _of_own_drafts(model, of, call, "composed", {"spec_logits": logits, "spec_confidence": confidence})


def _of_own_drafts(
    model: GoldenModel,
    of: Drafts,
    call: int,
    mode: Mode,
    rules: Mapping[str, Callable[[Ints, Mapping[str, Tensor]], Expectation]],
) -> Sequence[Expectation]:
    """The choice of ids by an implementation's own logits, and `rules` by tap, which depend on these ids."""
    tap, config = of.trace.scenario.tap, model.config
    shared = (first_ids(of.trace, call), config.dspark_block_size, config.vocab_size)
    after = [
        AfterOwnDrafts(name, mode, *shared, rule, {"spec_ids": tap(call, "spec_ids"), name: tap(call, name)})
        for name, rule in rules.items()
    ]
    return [OwnDrafts(*shared), *after]


def _blocks(model: GoldenModel, drafts: Sequence[Drafts], floors: Floors, case_id: str) -> Iterator[Step]:
    for of in drafts:
        trace = of.trace
        for block, layer in enumerate(model.config.draft_layers):
            name = f"layer {layer} of {trace.name}"
            arguments = {
                "config": model.mapping,
                "layer_id": layer,
                "weights": model.parameters.within(f"mtp.{block}.").mapping(),
                "batch_size": trace.batch,
            }
            yield Step(Open(name, "draft_block", arguments), place=Place(layer))
            for call in range(len(trace.starts)):
                inputs = {
                    "h": of.stream(block, call),
                    "pre": trace.scenario.tap(call, "pre_in", layer),
                    "main_x": trace.part(call, "main_x", layer),
                    "start_pos": trace.start_pos(call),
                }
                if call not in of.calls:
                    yield Step(
                        Advance(name, inputs),
                        optional=partial(_seeding, of, block, call, floors, case_id),
                        place=Place(layer),
                    )
                    continue
                required = partial(_block_rules, of, block, call, floors, case_id)
                optional = partial(_block_taps, model, of, block, call)
                yield Step(Advance(name, inputs), required, of.place(block, call), optional)
            place = Place(layer, [f"state after {len(trace.starts) - 1}"])
            yield Step(ReadState(name), partial(_ring_rules, model, trace, block), place)


def _seeding(of: Drafts, block: int, call: int, floors: Floors, case_id: str) -> Sequence[Expectation]:
    """A prefill only seeds the ring: what a block was given passes through."""
    layer = of.model.config.draft_layers[block]
    passed = Exact("attn_out", of.trace.scenario.tap(call, "attn_out", layer), STREAM_AXES)
    return [passed, *_block_rules(of, block, call, floors, case_id)]


def _block_rules(of: Drafts, block: int, call: int, floors: Floors, case_id: str) -> Sequence[Expectation]:
    return [
        Propagated(tap, of.tap(tap, block, call), floors.allowance(case_id, tap), floors.describe(), axes)
        for tap, axes in (("h_out", STREAM_AXES), ("pre_out", PER_STREAM))
    ]


def _block_taps(model: GoldenModel, of: Drafts, block: int, call: int) -> Sequence[Expectation]:
    """Taps that follow from the recorded inputs alone: up to the heads of the attention."""
    config, parameters = drafts_config(model.config), model.parameters.within(f"mtp.{block}.")
    h, pre = exact(of.stream(block, call)), exact(of.tap("pre_in", block, call))
    found = coefficients(config, h, *(parameters[f"hc_attn_{part}"] for part in ("fn", "scale", "base")))
    attn_in = rms_norm(read(h, pre).rounded(BF16), parameters["attn_norm.weight"], config.norm_eps)
    first = of.first(call)
    kept = ring(model, of.trace, block, first)
    latent, o = rules_of.draft_heads(config, block, parameters.within("attn."), attn_in.rounded(BF16), kept, first)
    expected = (
        ("attn_pre", found.pre, "F32", PER_STREAM),
        ("attn_post", found.post, "F32", PER_STREAM),
        ("attn_comb", found.comb, "F32", ("request", "position", "summed stream", "written stream")),
        ("attn_in", attn_in, "BF16", ROW_AXES),
        ("q_latent", latent, "BF16", ROW_AXES),
        ("attn_o", o, "BF16", ("request", "position", "head", "feature")),
    )
    return [Within(tap, value, dtype, axes, recorded=of.tap(tap, block, call)) for tap, value, dtype, axes in expected]


def _ring_rules(model: GoldenModel, trace: Trace, block: int) -> Sequence[Expectation]:
    layer = model.config.draft_layers[block]
    kept = ring(model, trace, block, trace.total)
    return [Within("window", kept, "BF16", RING_AXES, recorded=trace.state(layer, "window"))]


def head_arguments(model: GoldenModel, batch: int) -> Mapping[str, object]:
    """What `dspark` is opened with."""
    return {"config": model.mapping, "weights": model.parameters.mapping(), "batch_size": batch}


def _free_running(model: GoldenModel, drafts: Sequence[Drafts], floors: Floors, case_id: str) -> Iterator[Step]:
    for of in drafts:
        trace = of.trace
        yield Step(Open(trace.name, "dspark", head_arguments(model, trace.batch)))
        for call in range(len(trace.starts)):
            inputs = {
                "main_hidden": trace.part(call, "main_hidden"),
                "output_ids": trace.scenario.tap(call, "output_ids"),
                "start_pos": trace.start_pos(call),
            }
            rules = partial(draft_rules, model, of, call, floors, case_id)
            yield Step(Advance(trace.name, inputs), rules if call in of.calls else no_rules, of.place(None, call))
        place = Place(None, [f"state after {len(trace.starts) - 1}"])
        yield Step(ReadState(trace.name), partial(head_state_rules, model, trace), place)


def draft_rules(model: GoldenModel, of: Drafts, call: int, floors: Floors, case_id: str) -> Sequence[Expectation]:
    """Drafts of the whole head against the recorded ones, with the Markov terms of the implementation's own choices."""
    weights = last_block(model)

    def rule(
        name: str,
        axes: tuple[str, ...],
        markov_term: Callable[[Ints], Bounded],
        previous: Ints,
        recorded: Mapping[str, Tensor],
    ) -> Propagated:
        before = recorded["spec_ids"].data[:, :-1].astype(np.int64)
        change = markov_term(previous).value - markov_term(before).value
        moved = Tensor.from_values(recorded[name].values() + change, "F32")
        return Propagated(name, moved, floors.allowance(case_id, name), floors.describe(), axes)

    def of_confidence(previous: Ints) -> Bounded:
        nothing = Bounded.exact(np.zeros((*previous.shape, model.config.dim)))
        return rules_of.confidence(weights, nothing, previous)

    of_logits = partial(rules_of.markov_bias, weights)
    rules = {
        "spec_logits": partial(rule, "spec_logits", LOGIT_AXES, of_logits),
        "spec_confidence": partial(rule, "spec_confidence", LOGIT_AXES[:2], of_confidence),
    }
    return _of_own_drafts(model, of, call, "propagated", rules)


def head_state_rules(model: GoldenModel, trace: Trace, total: int | None = None) -> Sequence[Expectation]:
    """The rings after `total` positions, by default all, from the model's hidden states.

    Until a slot is listed, nothing depends on what it holds: only at the end does the recording say that it is zero.
    """
    config = drafts_config(model.config)
    end = trace.total if total is None else total
    hidden = exact(trace.joined("main_hidden")[:, :end])
    main_x = rules_of.main_projection(config, model.parameters.within("mtp.0."), hidden).rounded(BF16)
    rules: list[Expectation] = []
    for block, layer in enumerate(model.config.draft_layers):
        kept = rules_of.ring(config, block, model.parameters.within(f"mtp.{block}.attn."), main_x)
        if total is not None and end < config.window_size:
            error = kept.error.copy()
            error[:, end:] = np.inf
            kept = Bounded(kept.value, error)
        recorded = trace.state(layer, "window") if total is None else None
        rules.append(Within(f"layer{layer}/window", kept, "BF16", RING_AXES, recorded=recorded))
    return rules
