"""Hyper-connections: the coefficients with their Sinkhorn rounds, the read and the write of the residual streams."""

from __future__ import annotations

from collections.abc import Mapping

from conformance.bench.problem import POOL, Counts, Ints, Problem, Sizes, configured, lazily, made, one_method
from conformance.judge.bounded import Bounded
from conformance.judge.components import hyper_connections as rules_of
from conformance.judge.expectations import Verdict, Within
from conformance.tensors import Tensor

BF16_BYTES, FP32_BYTES = 2, 4


def _mixes(streams: int) -> Tensor:
    """fp32 mixes in (0, 1] for every row of the pool: [pool, streams]."""
    shares = abs(made("streams/mix", "small", POOL, streams).values()) + 0.25
    return Tensor.from_values(shares, "F32")


def hyper_connection_coefficients(sizes: Sizes) -> Problem:
    """pre, post and comb of bf16 [1, tokens, streams, width]: a projection, then the Sinkhorn rounds."""
    mapping, config = configured(dim=sizes["width"])
    tokens, width, streams = sizes["tokens"], sizes["width"], config.hc_mult
    mixes = (2 + streams) * streams
    bind, taps = one_method("hyper_connection_coefficients")
    pool = made("streams/h", "input", POOL, streams, width)
    fn, scale = made("streams/fn", "fp32", mixes, streams * width), made("streams/scale", "scale3", 3)
    base = made("streams/base", "small", mixes)
    expected = lazily(
        lambda: rules_of.coefficients(
            config, Bounded.exact(pool.values()[None]), fn.values(), scale.values(), base.values()
        )
    )
    axes = ("row", "stream", "written stream")

    def judge(results: Mapping[str, Tensor], which: Ints) -> list[Verdict]:
        parts = zip(taps, expected(), strict=True)
        return [
            Within(tap, value[0][which], "F32", axes[: value.value.ndim - 1]).judge(results) for tap, value in parts
        ]

    rounds = 2 * config.hc_sinkhorn_iters * 2 * streams * streams
    return Problem(
        (1, tokens),
        POOL,
        lambda call, which: {"h": pool[which][None]},
        judge,
        Counts(
            tokens * (2.0 * (mixes + 1) * streams * width + rounds),
            tokens * (BF16_BYTES * streams * width + FP32_BYTES * mixes) + fn.data.nbytes,
        ),
        bind,
        taps,
        {"config": mapping, "fn": fn, "scale": scale, "base": base},
    )


def hyper_connection_read(sizes: Sizes) -> Problem:
    """bf16 [1, tokens, streams, width] summed over streams under fp32 mixes."""
    _, config = configured(dim=sizes["width"])
    tokens, width, streams = sizes["tokens"], sizes["width"], config.hc_mult
    bind, taps = one_method("hyper_connection_read")
    pool, pre = made("streams/h", "input", POOL, streams, width), _mixes(streams)
    expected = lazily(lambda: rules_of.read(Bounded.exact(pool.values()), Bounded.exact(pre.values())))

    def judge(results: Mapping[str, Tensor], which: Ints) -> list[Verdict]:
        return [Within("out", expected()[which], "BF16", ("row", "feature")).judge(results)]

    return Problem(
        (1, tokens),
        POOL,
        lambda call, which: {"h": pool[which][None], "pre": pre[which][None]},
        judge,
        Counts(2.0 * tokens * streams * width, tokens * (BF16_BYTES * (streams + 1) * width + FP32_BYTES * streams)),
        bind,
        taps,
    )


def hyper_connection_write(sizes: Sizes) -> Problem:
    """bf16 [1, tokens, streams, width] mixed by comb, and the sublayer's output added under post."""
    _, config = configured(dim=sizes["width"])
    tokens, width, streams = sizes["tokens"], sizes["width"], config.hc_mult
    bind, taps = one_method("hyper_connection_write")
    pools = {
        "y": made("streams/y", "input", POOL, width),
        "h": made("streams/h", "input", POOL, streams, width),
        "post": _mixes(streams),
        "comb": Tensor.from_values(abs(made("streams/comb", "small", POOL, streams, streams).values()), "F32"),
    }
    expected = lazily(
        lambda: rules_of.write(**{name: Bounded.exact(pool.values()[None]) for name, pool in pools.items()})[0]
    )

    def judge(results: Mapping[str, Tensor], which: Ints) -> list[Verdict]:
        return [Within("out", expected()[which], "BF16", ("row", "stream", "feature")).judge(results)]

    return Problem(
        (1, tokens),
        POOL,
        lambda call, which: {name: pool[which][None] for name, pool in pools.items()},
        judge,
        Counts(
            2.0 * tokens * streams * (streams + 1) * width,
            tokens * (BF16_BYTES * (2 * streams + 1) * width + FP32_BYTES * streams * (streams + 1)),
        ),
        bind,
        taps,
    )
