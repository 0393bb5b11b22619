"""Mistakes in the rotary embedding (numerics.md 4)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

R = "rotary"
MIX = "frequencies / config.rope_factor * ramp + frequencies * (1.0 - ramp)"
ANGLES = "positions.to(torch.float32).unsqueeze(-1) * rotary_frequencies(config, layer_id)"

FAULTS: tuple[Fault, ...] = (
    Fault(
        R,
        "half-split-pairs",
        "rope-pairing",
        "Feature i is paired with i + 32 instead of its neighbour.",
        Edit(
            "rotary.rotate",
            """torch.unflatten(turning.to(compute), -1, (-1, 2)).unbind(-1)
    turned = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(-2)""",
            """turning.to(compute).chunk(2, dim=-1)
    turned = torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)""",
        ),
    ),
    Fault(
        R,
        "pairs-written-half-split",
        "rope-pairing",
        "Pairs are read as neighbours and written half-split.",
        Edit(
            "rotary.rotate",
            "torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(-2)",
            "torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)",
        ),
    ),
    Fault(
        R,
        "first-features-turn",
        "rope-part",
        "The first features of a head turn instead of the last.",
        Edit(
            "rotary.rotate",
            "still, turning = torch.split(x, [x.shape[-1] - config.rope_head_dim, config.rope_head_dim], dim=-1)",
            "x = x.roll(-config.rope_head_dim, -1) if x.shape[-1] > config.rope_head_dim else x\n"
            "    still, turning = torch.split(x, [x.shape[-1] - config.rope_head_dim, config.rope_head_dim], dim=-1)",
        ),
    ),
    Fault(
        R,
        "turned-the-other-way",
        "rope-direction",
        "Forward and inverse rotation are swapped.",
        Edit("rotary.rotate", "if inverse:", "if not inverse:"),
    ),
    Fault(
        R,
        "inverse-ignored",
        "rope-inverse",
        "The output is turned on instead of back.",
        Edit("rotary.rotate", "sin = -sin", "sin = +sin"),
    ),
    Fault(
        R,
        "inverse-negates-cosine",
        "rope-inverse",
        "The conjugate gets the wrong sign.",
        Edit("rotary.rotate", "sin = -sin", "cos = -cos"),
    ),
    Fault(
        R,
        "one-base-for-all-10000",
        "rope-base",
        "Layers with compressed rows use the base of the others, without YaRN.",
        Edit("rotary.rotary_frequencies", "config.ratio(layer_id) > 0", "False"),
    ),
    Fault(
        R,
        "one-base-for-all-160000",
        "rope-base",
        "Window-only layers use the base of the others, with YaRN.",
        Edit("rotary.rotary_frequencies", "config.ratio(layer_id) > 0", "True"),
    ),
    Fault(
        R,
        "ratio-1-as-window-only",
        "rope-base",
        "Layers of ratio 1 count as not compressed.",
        Edit("rotary.rotary_frequencies", "config.ratio(layer_id) > 0", "config.ratio(layer_id) > 1"),
    ),
    Fault(
        R,
        "yarn-missing",
        "yarn-missing",
        "The frequencies are not scaled at all.",
        Edit("rotary._frequencies", MIX, "frequencies"),
    ),
    Fault(
        R,
        "yarn-on-every-frequency",
        "yarn-ramp",
        "All frequencies are divided by the factor.",
        Edit("rotary._frequencies", MIX, "frequencies / config.rope_factor"),
    ),
    Fault(
        R,
        "yarn-ramp-turned-round",
        "yarn-ramp",
        "High frequencies are scaled and low ones kept.",
        Edit(
            "rotary._frequencies",
            MIX,
            "frequencies / config.rope_factor * (1.0 - ramp) + frequencies * ramp",
        ),
    ),
    Fault(
        R,
        "yarn-ramp-not-limited",
        "yarn-ramp",
        "The ramp leaves 0..1.",
        Edit("rotary._frequencies", ".clamp(0.0, 1.0)", ""),
    ),
    Fault(
        R,
        "yarn-range-may-pass-the-last-feature",
        "yarn-ramp",
        "The upper end of the ramp is not limited to the last feature.",
        Edit(
            "rotary.yarn_range",
            "min(math.ceil(dim(config.beta_slow)), config.rope_head_dim - 1)",
            "math.ceil(dim(config.beta_slow))",
        ),
    ),
    Fault(
        R,
        "yarn-range-limited-to-the-number-of-features",
        "yarn-ramp",
        "The upper end of the ramp is limited one too far.",
        Edit("rotary.yarn_range", "config.rope_head_dim - 1)", "config.rope_head_dim)"),
    ),
    Fault(
        R,
        "yarn-range-limited-to-the-last-pair",
        "yarn-ramp",
        "The upper end of the ramp is limited to the last pair, half as far.",
        Edit("rotary.yarn_range", "config.rope_head_dim - 1)", "config.rope_head_dim // 2 - 1)"),
    ),
    Fault(
        R,
        "yarn-range-may-be-negative",
        "yarn-ramp",
        "The lower end of the ramp is not limited to the first pair.",
        Edit("rotary.yarn_range", "max(math.floor(dim(config.beta_fast)), 0)", "math.floor(dim(config.beta_fast))"),
    ),
    Fault(
        R,
        "yarn-range-not-whole",
        "yarn-ramp",
        "The lower end of the ramp is not rounded down.",
        Edit("rotary.yarn_range", "math.floor(dim(config.beta_fast))", "dim(config.beta_fast)"),
    ),
    Fault(
        R,
        "yarn-range-rounded-down",
        "yarn-ramp",
        "The upper end of the ramp is rounded down.",
        Edit("rotary.yarn_range", "math.ceil(dim(config.beta_slow))", "math.floor(dim(config.beta_slow))"),
    ),
    Fault(
        R,
        "yarn-mscale",
        "yarn-mscale",
        "Cosine and sine are multiplied by YaRN's attention factor.",
        Edit(
            "rotary.rotary_tables",
            "torch.polar(torch.ones_like(angles, dtype=compute), angles.to(compute))",
            "torch.polar(torch.full_like(angles, 0.1 * math.log(config.rope_factor) + 1.0, dtype=compute),"
            " angles.to(compute))",
        ),
    ),
    Fault(
        R,
        "negative-power",
        "rope-frequency-rounding",
        "The frequency is a power with a negative exponent instead of a reciprocal.",
        Edit("rotary.base_frequencies", "1.0 / power", "torch.pow(torch.tensor(base), -exponent)"),
    ),
    Fault(
        R,
        "frequency-rounded-once",
        "rope-frequency-rounding",
        "Power and reciprocal are taken in double and rounded once.",
        Edit(
            "rotary.base_frequencies",
            "1.0 / power",
            "(1.0 / torch.pow(torch.tensor(base, dtype=torch.float64), exponent.double())).float()",
        ),
    ),
    Fault(
        R,
        "angle-in-double",
        "rope-angle-precision",
        "The angle is not rounded to fp32.",
        Edit(
            "rotary.rotary_tables",
            """positions.to(torch.float32).unsqueeze(-1) * rotary_frequencies(config, layer_id)
    turn = torch.polar(torch.ones_like(angles, dtype=compute), angles.to(compute))""",
            """positions.double().unsqueeze(-1) * rotary_frequencies(config, layer_id).double()
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)""",
        ),
    ),
    Fault(
        R,
        "positions-in-bf16",
        "rope-angle-precision",
        "Positions pass through bf16: those beyond 256 collapse.",
        Edit("rotary.rotary_tables", "positions.to(torch.float32)", "positions.bfloat16().float()"),
    ),
    Fault(
        R,
        "tables-in-bf16",
        "rope-tables-in-bf16",
        "Cosine and sine are kept in bf16.",
        Edit(
            "rotary.rotary_tables",
            "torch.polar(torch.ones_like(angles, dtype=compute), angles.to(compute))",
            "torch.polar(torch.ones_like(angles, dtype=compute), angles.to(compute))\n"
            "    turn = torch.complex(arithmetic.as_bf16(turn.real), arithmetic.as_bf16(turn.imag))",
        ),
    ),
    Fault(
        R,
        "positions-from-one",
        "rope-position",
        "The first token stands at position 1.",
        Edit("rotary.rotary_tables", "positions.to(torch.float32)", "(positions + 1).to(torch.float32)"),
    ),
    Fault(
        R,
        "positions-local-to-call",
        "rope-position",
        "Every call begins at position 0 again.",
        Edit("rotary.rotate", "layer_id, positions, compute", "layer_id, positions - positions[:, :1], compute"),
    ),
    Fault(
        R,
        "table-too-short",
        "rope-table-length",
        "Positions beyond the original context get the last row of the table.",
        Edit(
            "rotary.rotary_tables",
            "positions.to(torch.float32)",
            "positions.clamp(max=max(1, config.original_seq_len - 1)).to(torch.float32)",
        ),
    ),
    Fault(
        R,
        "truncated",
        "bf16-truncated",
        "The result is cut to bf16 instead of rounded.",
        Edit("rotary.rotate", "to_bf16(turned)", "arithmetic.truncate(turned)"),
    ),
)
