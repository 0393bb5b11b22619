"""Mistakes in the attention over listed rows (numerics.md 6, item 5)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit, Replace

S = "sparse_attention"
ATTEND = "sparse_attention._attend"
CALL = "sparse_attention.sparse_attention"
SINK = "torch.exp(sink - maximum)"

FAULTS: tuple[Fault, ...] = (
    Fault(
        S, "sink-ignored", "sink-missing", "The sink is left out.", Edit(ATTEND, f"denominator + {SINK}", "denominator")
    ),
    Fault(
        S,
        "sink-scaled",
        "sink-scaled",
        "The sink logit is multiplied by the softmax scale.",
        Edit(ATTEND, SINK, "torch.exp(sink * scale - maximum)"),
    ),
    Fault(
        S,
        "sink-of-first-head",
        "sink-of-first-head",
        "One sink serves all heads.",
        Edit(ATTEND, SINK, "torch.exp(sink[:1] - maximum)"),
    ),
    Fault(
        S,
        "sink-not-relative",
        "sink-not-shifted",
        "The sink's exponential is not taken relative to the maximum.",
        Edit(ATTEND, SINK, "torch.exp(sink)"),
    ),
    Fault(
        S,
        "sink-per-block",
        "sink-per-block",
        "The sink is added once for every block of the list.",
        Edit(ATTEND, SINK, f"{SINK} * -(-indices.shape[-1] // LIST_BLOCK)"),
    ),
    Fault(
        S,
        "sink-attends-to-row-0",
        "sink-has-value",
        "The sink's probability goes to the first row.",
        Edit(
            ATTEND,
            "to_bf16(numerator /",
            f"to_bf16((numerator + ({SINK}).unsqueeze(-1) * kv[:, None, None, 0].to(compute)) /",
        ),
    ),
    Fault(
        S,
        "none-reads-row-0",
        "minus-one-read-as-row",
        "Entries of -1 read the first row.",
        Edit(ATTEND, "(listed < 0)", "(listed < -1)"),
    ),
    Fault(
        S,
        "none-reads-last-row",
        "minus-one-read-as-row",
        "Entries of -1 count from the end.",
        Edit(
            ATTEND,
            """listed.clamp(min=0)].to(compute)
        scores = (q @ rows.transpose(-1, -2)) * scale
        scores = scores.masked_fill((listed < 0).unsqueeze(-2), -torch.inf)""",
            """listed].to(compute)
        scores = (q @ rows.transpose(-1, -2)) * scale""",
        ),
    ),
    Fault(
        S,
        "none-scores-zero",
        "minus-one-read-as-row",
        "Entries of -1 take part with a score of zero.",
        Edit(ATTEND, ".unsqueeze(-2), -torch.inf)", ".unsqueeze(-2), 0.0)"),
    ),
    Fault(
        S,
        "empty-list-nan",
        "empty-list-not-zero",
        "A query without any row divides zero by zero.",
        Replace("sparse_attention.RUNNING_MAXIMUM_START", float("-inf")),
    ),
    Fault(
        S,
        "scale-missing",
        "scale-wrong",
        "Scores are not scaled.",
        Edit(ATTEND, ".transpose(-1, -2)) * scale", ".transpose(-1, -2))"),
    ),
    Fault(
        S,
        "scale-twice",
        "scale-wrong",
        "Queries arrive scaled and are scaled again.",
        Edit(ATTEND, ".transpose(-1, -2)) * scale", ".transpose(-1, -2)) * scale * scale"),
    ),
    Fault(
        S,
        "duplicates-once",
        "duplicates-removed",
        "An index that is listed twice counts once.",
        Edit(ATTEND, "(listed < 0)", "((listed < 0) | arithmetic.duplicates(listed))"),
    ),
    Fault(
        S,
        "probabilities-truncated",
        "bf16-truncated",
        "Probabilities are cut to bf16 instead of rounded.",
        Edit(ATTEND, "to_bf16(probabilities)", "arithmetic.truncate(probabilities)"),
    ),
    Fault(
        S,
        "denominator-in-bf16",
        "bf16-accumulator",
        "The denominator is kept in bf16.",
        Edit(ATTEND, "probabilities.sum(dim=-1)", "arithmetic.bf16_sum(probabilities, -1)"),
    ),
    Fault(
        S,
        "scores-in-bf16",
        "scores-in-bf16",
        "Scores are rounded to bf16 before the exponential.",
        Edit(
            ATTEND, "(q @ rows.transpose(-1, -2)) * scale", "arithmetic.as_bf16((q @ rows.transpose(-1, -2)) * scale)"
        ),
    ),
    Fault(
        S,
        "numerator-not-rescaled",
        "numerator-not-rescaled",
        "The numerator keeps the weight of an older maximum.",
        Edit(ATTEND, "numerator * rescale.unsqueeze(-1)", "numerator"),
    ),
    Fault(
        S,
        "denominator-not-rescaled",
        "no-rescaling",
        "The denominator keeps the weight of an older maximum.",
        Edit(ATTEND, "denominator * rescale", "denominator"),
    ),
    Fault(
        S,
        "maximum-of-last-block",
        "maximum-of-last-block",
        "Each block of the list takes its own maximum.",
        Edit(ATTEND, "torch.maximum(maximum, scores.amax(dim=-1))", "scores.amax(dim=-1).clamp(min=-1e30)"),
    ),
    Fault(
        S,
        "maximum-not-subtracted",
        "no-maximum",
        "Exponentials are taken of the scores as they are.",
        Edit(ATTEND, "torch.maximum(maximum, scores.amax(dim=-1))", "torch.zeros_like(maximum)"),
    ),
    Fault(
        S,
        "only-first-block",
        "last-list-block-dropped",
        "Only the first 64 entries of the list are read.",
        Edit(
            ATTEND,
            "range(0, indices.shape[-1], LIST_BLOCK)",
            "range(0, min(indices.shape[-1], LIST_BLOCK), LIST_BLOCK)",
        ),
    ),
    Fault(
        S,
        "last-entry-lost",
        "last-list-block-dropped",
        "The last entry of the list is not read.",
        Edit(CALL, "torch.split(indices, step, dim=1)", "torch.split(indices[..., :-1], step, dim=1)"),
    ),
    Fault(
        S,
        "list-of-first-request",
        "requests-mixed",
        "All requests read the rows of the first.",
        Edit(
            ATTEND,
            "torch.arange(q.shape[0])[:, None, None]",
            "torch.zeros(q.shape[0], dtype=torch.int64)[:, None, None]",
        ),
    ),
    Fault(
        S,
        "exp-base-2",
        "scale-wrong",
        "The exponential has base 2 without the factor.",
        Edit(ATTEND, "torch.exp(scores - new_maximum.unsqueeze(-1))", "torch.exp2(scores - new_maximum.unsqueeze(-1))"),
    ),
    Fault(
        S,
        "truncated",
        "bf16-truncated",
        "The result is cut to bf16 instead of rounded.",
        Edit(ATTEND, "to_bf16(numerator /", "arithmetic.truncate(numerator /"),
    ),
    Fault(
        S,
        "maximum-starts-at-zero",
        "maximum-starts-at-zero",
        "The running maximum starts at zero.",
        Replace("sparse_attention.RUNNING_MAXIMUM_START", 0.0),
    ),
    Fault(
        S,
        "list-of-first-query",
        "list-of-first-query",
        "All queries of a call read the first one's list.",
        Edit(
            CALL, "_attend(q_piece, kv, indices_piece,", "_attend(q_piece, kv, indices[:, :1].expand_as(indices_piece),"
        ),
    ),
    Fault(
        S,
        "list-ends-at-minus-one",
        "list-ends-at-minus-one",
        "The list ends at its first -1.",
        Edit(ATTEND, "(listed < 0)", "((indices < 0).cumsum(-1) > 0)[..., start : start + LIST_BLOCK]"),
    ),
    Fault(
        S,
        "unlisted-rows-read",
        "unlisted-rows-read",
        "The list's unfilled last block is read in full.",
        Edit(
            ATTEND,
            "listed = indices[..., start : start + LIST_BLOCK]",
            "listed = indices[..., start : start + LIST_BLOCK]\n"
            "        listed = torch.nn.functional.pad(listed, (0, LIST_BLOCK - listed.shape[-1]), value=0)",
        ),
    ),
    Fault(
        S,
        "sink-clipped",
        "sink-clipped",
        "The sink's term is limited to one.",
        Edit(ATTEND, SINK, "torch.exp((sink - maximum).clamp(max=0.0))"),
    ),
    Fault(
        S,
        "equal-rows-once",
        "same-rows-removed",
        "Rows that are equal count once.",
        Edit(
            ATTEND,
            "(listed < 0)",
            "((listed < 0) | torch.tril((rows.unsqueeze(-2) == rows.unsqueeze(-3)).all(-1), -1).any(-1))",
        ),
    ),
)
