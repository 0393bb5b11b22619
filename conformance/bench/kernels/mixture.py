"""The mixture: the gate, and routed experts with the shared one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from conformance.bench.problem import (
    POOL,
    Arguments,
    Counts,
    Ints,
    Problem,
    Sizes,
    SizesError,
    configured,
    draws,
    lazily,
    made,
    made_weight,
    nbytes,
    one_method,
)
from conformance.judge.bounded import Bounded
from conformance.judge.choices import GateChoice
from conformance.judge.components.experts import combined
from conformance.judge.components.gate import scores
from conformance.judge.components.linear import Parameters
from conformance.judge.expectations import Verdict, Within
from conformance.tensors import Tensor

CONTENTS = 8
"""Different experts: an expert's weights have one of so many contents, each at its own place in memory."""
MATRICES = ("w1", "w2", "w3")


def gate(sizes: Sizes) -> Problem:
    """Choice of experts and their weights, of bf16 [tokens, width]."""
    mapping, config = configured(dim=sizes["width"], n_routed_experts=sizes["experts"])
    tokens, width, experts = sizes["tokens"], config.dim, config.n_routed_experts
    bind, taps = one_method("gate")
    pool = made("gate/x", "input", POOL, width)
    weights = {
        "weight": made("gate/weight", "bf16", experts, width),
        "bias": made("gate/bias", "small", experts),
        "bias_vl": made("gate/bias_vl", "small", experts),
    }
    images = draws("gate/images").integers(0, 2, POOL).astype(np.bool_)
    bounds = lazily(lambda: scores(Parameters(weights), Bounded.exact(pool.values()), images))

    def judge(results: Mapping[str, Tensor], which: Ints) -> list[Verdict]:
        plain, biased = bounds()
        rule = GateChoice(
            plain[which], biased[which], config.n_activated_experts, config.route_scale, ("row", "choice")
        )
        return [rule.judge(results)]

    stored = nbytes(*weights.values())
    return Problem(
        (tokens,),
        POOL,
        lambda call, which: {"x": pool[which], "image_mask": Tensor("BOOL", images[which])},
        judge,
        Counts(
            2.0 * tokens * width * experts,
            2 * tokens * width + tokens + stored + 8 * tokens * config.n_activated_experts,
            stored,
        ),
        bind,
        taps,
        {"config": mapping, "weights": weights},
    )


def _numbers(sizes: Sizes, choices: int) -> Ints:
    """Which experts have each content, as equally as can be, in no order: [CONTENTS, experts / CONTENTS].

    Raises:
        SizesError: the contents do not go into the experts, or a token could not have `choices` different ones.
    """
    if sizes["experts"] % CONTENTS or choices > CONTENTS:
        raise SizesError(f"experts = {sizes['experts']}, choices = {choices}: not {CONTENTS} kinds of experts")
    order = draws("experts/numbers").permutation(sizes["experts"])
    return np.asarray(order.reshape(CONTENTS, -1), dtype=np.int64)


def experts(sizes: Sizes) -> Problem:
    """Routed FP4 experts as chosen and the shared FP8 one, of bf16 [tokens, width].

    Row p of the pool chooses contents p, p + 1, ...; which of the experts with a content it chooses differs from token
    to token and from call to call, and none is chosen again before all others of its content were.
    """
    mapping, config = configured(dim=sizes["width"], moe_inter_dim=sizes["inner"], n_routed_experts=sizes["experts"])
    tokens, width, inner, choices = sizes["tokens"], config.dim, config.moe_inter_dim, config.n_activated_experts
    numbers = _numbers(sizes, choices)
    bind, taps = one_method("experts")
    shapes = {"w1": (inner, width), "w2": (width, inner), "w3": (inner, width)}
    contents: dict[str, Tensor] = {}
    for unit, kind in [*((f"experts.{c}", "fp4") for c in range(CONTENTS)), ("shared_experts", "fp8")]:
        for matrix in MATRICES:
            pair = made_weight(f"{unit}.{matrix}", kind, *shapes[matrix])
            contents[f"{unit}.{matrix}.weight"], contents[f"{unit}.{matrix}.scale"] = pair
    content_of = np.argsort(numbers.reshape(-1)) // numbers.shape[1]
    weights = {
        f"experts.{number}.{matrix}.{part}": contents[f"experts.{content}.{matrix}.{part}"]
        for number, content in enumerate(content_of)
        for matrix in MATRICES
        for part in ("weight", "scale")
    } | {name: tensor for name, tensor in contents.items() if name.startswith("shared")}
    pool = CONTENTS
    x = made("experts/x", "input", pool, width)
    routing = Tensor.from_values(abs(made("experts/routing", "small", pool, choices).values()) + 0.125, "F32")
    chosen = (np.arange(pool)[:, None] + np.arange(choices)) % CONTENTS
    expected = lazily(
        lambda: combined(
            config, Parameters(contents), Bounded.exact(x.values()), Bounded.exact(routing.values()), chosen
        )
    )

    def own(call: int, which: Ints) -> Arguments:
        of_content = chosen[which]
        indices = np.zeros_like(of_content)
        for content in range(CONTENTS):
            places = np.nonzero(of_content == content)
            turn = (np.arange(len(places[0])) + call) % numbers.shape[1]
            indices[places] = numbers[content][turn]
        return {
            "x": x[which],
            "routing_weights": routing[which],
            "expert_indices": Tensor("I32", indices.astype(np.int32)),
        }

    def judge(results: Mapping[str, Tensor], which: Ints) -> list[Verdict]:
        return [Within("ffn_out", expected()[which], "BF16", ("row", "feature")).judge(results)]

    # Each content is chosen about equally often, and by turns.
    used = min(sizes["experts"], tokens * choices)
    of_expert = nbytes(*(contents[f"experts.0.{m}.{part}"] for m in MATRICES for part in ("weight", "scale")))
    shared = nbytes(*(tensor for name, tensor in contents.items() if name.startswith("shared")))
    return Problem(
        (tokens,),
        pool,
        own,
        judge,
        Counts(
            6.0 * tokens * width * inner * (choices + config.n_shared_experts),
            used * of_expert + shared + tokens * (4 * width + 8 * choices),
            used * of_expert + shared,
        ),
        bind,
        taps,
        {"config": mapping, "weights": weights},
    )
