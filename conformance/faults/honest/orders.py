"""Variants of the arithmetic between the rounding points: orders of sums, precision, forms of a function."""

from __future__ import annotations

import torch

from conformance.faults.arithmetic import log_sinkhorn
from conformance.faults.honest.variant import HonestVariant
from conformance.faults.patches import Change, Edit, Replace

BF16_PRODUCT = "functional.linear(x.to(compute), weight.to(compute))"
BIASED_PRODUCT = "functional.linear(x.to(compute), weight.to(compute), bias.to(compute))"
SCALED_PRODUCT = "functional.linear(x, weight)"
SUM_ORDER = "The order of a sum is free (numerics.md 0)."
PRECISION = "More precision than required between the same rounding points (numerics.md 0)."


def products(form: str) -> tuple[Change, ...]:
    """All products of bf16 and fp32 layers by another function; `{x}` and `{w}` stand for the operands."""
    new = form.format(x="x.to(compute)", w="weight.to(compute)")
    return (
        Edit("linear.linear_bf16", BF16_PRODUCT, new),
        Edit("linear.linear_fp32", BF16_PRODUCT, new),
        Edit("vision.linear_with_bias", BIASED_PRODUCT, f"{new} + bias.to(compute)"),
    )


def scaled_products(form: str) -> Change:
    """All products of FP8 and FP4 layers by another function."""
    return Edit("linear.scaled_product", SCALED_PRODUCT, form.format(x="x", w="weight"))


def all_products(form: str) -> tuple[Change, ...]:
    """All products of layers, whatever their weights are, by another function."""
    return (*products(form), scaled_products(form))


ORDERS: tuple[HonestVariant, ...] = (
    HonestVariant("float32", "The reference itself: another order of sums than the recording's kernels."),
    HonestVariant("float64", PRECISION, options={"compute": torch.float64}),
    HonestVariant(
        "sums-reversed",
        SUM_ORDER,
        changes=all_products("functional.linear({x}.flip(-1), {w}.flip(-1))"),
    ),
    HonestVariant(
        "heads-and-streams-in-reverse",
        SUM_ORDER,
        changes=(
            Edit(
                "indexer._score_heads",
                "weighted.to(compute).sum(dim=2)",
                "arithmetic.sequential_sum(weighted.to(compute).flip(2), 2)",
            ),
            Edit(
                "hyper_connections.hyper_connection_read",
                "(pre.unsqueeze(-1) * h).sum(dim=-2)",
                "arithmetic.sequential_sum((pre.unsqueeze(-1) * h).flip(-2), -2)",
            ),
            Edit(
                "hyper_connections.hyper_connection_write",
                "for stream in range(h.shape[-2]):",
                "for stream in reversed(range(h.shape[-2])):",
            ),
        ),
    ),
    HonestVariant(
        "sums-pairwise",
        SUM_ORDER,
        changes=all_products("arithmetic.pairwise_product({x}, {w})"),
    ),
    *(
        HonestVariant(
            f"sums-in-blocks-of-{block}",
            SUM_ORDER,
            changes=all_products(f"arithmetic.blocked_product({{x}}, {{w}}, {block})"),
        )
        for block in (16, 32, 64, 128)
    ),
    *(
        HonestVariant(
            f"sums-split-in-{parts}",
            "Split-K: partial sums of parallel workers are added at the end.",
            changes=all_products(f"arithmetic.split_product({{x}}, {{w}}, {parts})"),
        )
        for parts in (2, 4, 8)
    ),
    HonestVariant(
        "products-in-double",
        PRECISION,
        changes=all_products("functional.linear({x}.double(), {w}.double()).to({x}.dtype)"),
    ),
    HonestVariant(
        "streams-in-double",
        PRECISION,
        changes=(
            Edit(
                "hyper_connections.hyper_connection_coefficients",
                "flat = h.flatten(-2).to(compute)",
                "compute = torch.float64\n    flat = h.flatten(-2).to(compute)",
            ),
            Edit(
                "hyper_connections.hyper_connection_coefficients",
                "return pre, post, comb",
                "return pre.float(), post.float(), comb.float()",
            ),
            Edit("hyper_connections.hyper_connection_read", "h, pre = ", "compute = torch.float64\n    h, pre = "),
        ),
    ),
    HonestVariant(
        "gate-in-double",
        PRECISION,
        changes=(
            Edit("gate.gate", "scores = functional", "compute = torch.float64\n    scores = functional"),
            Edit("gate.gate", "return routing,", "return routing.float(),"),
        ),
    ),
    HonestVariant(
        "attention-in-double",
        PRECISION,
        changes=(
            Edit(
                "sparse_attention._attend",
                "q, sink = q.to(compute)",
                "compute = torch.float64\n    q, sink = q.to(compute)",
            ),
        ),
    ),
    HonestVariant(
        "norm-by-sequential-sum",
        SUM_ORDER,
        changes=(
            Edit(
                "norm.rms_norm",
                "x.square().mean(dim=-1, keepdim=True)",
                "arithmetic.sequential_sum(x.square(), -1).unsqueeze(-1) / x.shape[-1]",
            ),
        ),
    ),
    HonestVariant(
        "norm-by-division",
        "1/√x and division are as good as rsqrt.",
        changes=(Edit("norm.rms_norm", "x * torch.rsqrt(", "x / torch.sqrt("),),
    ),
    HonestVariant(
        "norm-weight-first",
        "The factors of a product in fp32 may be taken in any order.",
        changes=(
            Edit(
                "norm.rms_norm",
                """normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return to_bf16(normed * weight.to(compute))""",
                """inverse = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return to_bf16(x * (inverse * weight.to(compute)))""",
            ),
        ),
    ),
    HonestVariant(
        "rotation-complex",
        "The rotation is one complex product, as the published code writes it.",
        changes=(
            Edit(
                "rotary.rotate",
                "torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(-2)",
                "torch.view_as_real(torch.complex(real, imaginary) * torch.complex(cos, sin)).flatten(-2)",
            ),
        ),
    ),
    HonestVariant(
        "rotation-fused",
        "A fused multiply-add rounds the two products of a rotation once.",
        changes=(
            Edit(
                "rotary.rotate",
                "(real * cos - imaginary * sin, real * sin + imaginary * cos)",
                "((real.double() * cos.double() - (imaginary * sin).double()).to(compute),"
                " (real.double() * sin.double() + (imaginary * cos).double()).to(compute))",
            ),
        ),
    ),
    HonestVariant(
        "rotation-tables-from-double",
        "Cosine and sine of the fp32 angle may be more precise than fp32 functions.",
        changes=(
            Edit(
                "rotary.rotary_tables",
                "return turn.real, turn.imag",
                "return torch.cos(angles.double()).to(compute), torch.sin(angles.double()).to(compute)",
            ),
        ),
    ),
    HonestVariant(
        "sinkhorn-in-logarithms",
        "Sinkhorn may run on logarithms.",
        changes=(Replace("hyper_connections.sinkhorn", log_sinkhorn),),
    ),
    HonestVariant(
        "sinkhorn-by-reciprocals",
        "A row may be multiplied by the reciprocal of its sum.",
        changes=(
            Edit(
                "hyper_connections.sinkhorn",
                "c = c / (c.sum(dim=-1, keepdim=True) + eps)",
                "c = c * (1.0 / (c.sum(dim=-1, keepdim=True) + eps))",
            ),
        ),
    ),
    HonestVariant(
        "streams-written-fused",
        SUM_ORDER,
        changes=(
            Edit(
                "hyper_connections.hyper_connection_write",
                "mixed = torch.zeros_like(h)",
                "mixed = post.unsqueeze(-1) * y.unsqueeze(-2)",
            ),
            Edit("hyper_connections.hyper_connection_write", "post.unsqueeze(-1) * y.unsqueeze(-2) + mixed", "mixed"),
        ),
    ),
    HonestVariant(
        "streams-written-by-matrix",
        SUM_ORDER,
        changes=(
            Edit(
                "hyper_connections.hyper_connection_write",
                "return to_bf16(",
                "mixed = comb.mT @ h\n    return to_bf16(",
            ),
        ),
    ),
    HonestVariant(
        "exponentials-by-exp2",
        "Kernels take exp as a power of two with a rounded factor.",
        changes=(
            Edit(
                "sparse_attention._attend",
                "torch.exp(scores - new_maximum.unsqueeze(-1))",
                "arithmetic.exp_by_exp2(scores - new_maximum.unsqueeze(-1))",
            ),
            Edit(
                "sparse_attention._attend",
                "torch.exp(maximum - new_maximum)",
                "arithmetic.exp_by_exp2(maximum - new_maximum)",
            ),
            Edit("sparse_attention._attend", "torch.exp(sink - maximum)", "arithmetic.exp_by_exp2(sink - maximum)"),
        ),
    ),
    HonestVariant(
        "sink-in-maximum",
        "Any maximum will do: numerator and denominator are relative to the same one.",
        changes=(
            Edit(
                "sparse_attention._attend",
                "maximum = torch.full(q.shape[:-1], RUNNING_MAXIMUM_START, dtype=compute)",
                "maximum = sink.expand(q.shape[:-1]).clone().clamp(min=RUNNING_MAXIMUM_START)",
            ),
        ),
    ),
    *(
        HonestVariant(
            f"list-blocks-of-{block}",
            "The running maximum of the attention may advance in blocks of any size.",
            changes=(Replace("sparse_attention.LIST_BLOCK", block),),
        )
        for block in (16, 32, 128)
    ),
    HonestVariant(
        "final-maximum",
        "Probabilities may be rounded relative to the final maximum.",
        changes=(Replace("sparse_attention.LIST_BLOCK", 1 << 20),),
    ),
    HonestVariant(
        "scale-on-queries",
        "The power-of-two part of the softmax scale may be applied to either side; in fp32 the rest may, too.",
        changes=(
            Edit(
                "sparse_attention._attend",
                "(q @ rows.transpose(-1, -2)) * scale",
                "(q * scale) @ rows.transpose(-1, -2)",
            ),
        ),
    ),
    HonestVariant(
        "softplus-by-logaddexp",
        "softplus(z) is log(e^0 + e^z).",
        changes=(
            Edit(
                "gate.gate",
                'functional.softplus(linear_fp32(x, weights["weight"], compute=compute))',
                'torch.logaddexp(linear_fp32(x, weights["weight"], compute=compute), torch.zeros((), dtype=compute))',
            ),
        ),
    ),
    HonestVariant(
        "silu-by-division",
        "silu(g) is g / (1 + e^-g).",
        changes=(
            Edit(
                "experts.clamped_swiglu",
                "functional.silu(gate.clamp(max=limit))",
                "gate.clamp(max=limit) / (1.0 + torch.exp(-gate.clamp(max=limit)))",
            ),
        ),
    ),
    HonestVariant(
        "experts-in-reverse",
        "The sum over experts runs in fp32 in any order.",
        changes=(
            Edit(
                "experts.experts",
                "sorted(set(expert_indices.flatten().tolist()))",
                "sorted(set(expert_indices.flatten().tolist()), reverse=True)",
            ),
        ),
    ),
    HonestVariant(
        "shared-expert-first",
        "The sum over experts runs in fp32 in any order.",
        changes=(
            Edit(
                "experts.experts",
                "total = torch.zeros(x.shape, dtype=compute)",
                """total = torch.zeros(x.shape, dtype=compute)
    if config.n_shared_experts:
        total = expert(config, Scoped(weights, "shared_experts"), x, None, compute=compute).to(compute)""",
            ),
            Edit(
                "experts.experts",
                "total = total + expert_of_quantized(config, shared, a, None, compute=compute).to(compute)",
                "pass",
            ),
        ),
    ),
    HonestVariant(
        "experts-token-by-token",
        "Which tokens of an expert are computed together is free.",
        changes=(
            Edit(
                "experts.experts",
                "out = expert_of_quantized(config, routed, a[token], routing_weights[token, choice], compute=compute)",
                "out = torch.cat([expert(config, routed, x[[t]], routing_weights[[t], [c]], compute=compute)"
                " for t, c in zip(token.tolist(), choice.tolist())])",
            ),
        ),
    ),
    HonestVariant(
        "pooling-by-sigmoid",
        "The softmax over two gates is a sigmoid of their difference.",
        changes=(
            Edit(
                "compressor.pool_groups",
                "torch.softmax(score, dim=2)",
                "(torch.sigmoid(score - score.flip(2).nan_to_num(neginf=-1e30)) if score.shape[2] == 2"
                " else torch.softmax(score, dim=2))",
            ),
        ),
    ),
    HonestVariant(
        "engram-product-otherwise",
        "The factors of the gate's product may be taken in any order.",
        changes=(
            Edit(
                "engram.engram_gate",
                "(h * q_weight * k_weight * key).sum(dim=-1)",
                "arithmetic.pairwise_sum((h * q_weight) * (key * k_weight), -1)",
            ),
        ),
    ),
)
