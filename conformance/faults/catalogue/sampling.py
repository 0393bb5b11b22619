"""Mistakes in drawing a token at a temperature (numerics.md 9)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit

S = "sampling"
SAMPLE = "sampling.sample"
DRAWS = "sampling.draws"
SOFTMAX = "torch.softmax(logits.to(compute) / temperature, dim=-1)"

FAULTS: tuple[Fault, ...] = (
    Fault(
        S,
        "temperature-ignored",
        "temperature-ignored",
        "Draws are from the softmax at temperature 1.",
        Edit(SAMPLE, "logits.to(compute) / temperature", "logits.to(compute)"),
    ),
    Fault(
        S,
        "temperature-multiplied",
        "temperature-inverted",
        "Logits are multiplied by the temperature.",
        Edit(SAMPLE, "logits.to(compute) / temperature", "logits.to(compute) * temperature"),
    ),
    Fault(
        S,
        "probabilities-over-temperature",
        "temperature-ignored",
        "Probabilities are divided by the temperature instead of logits: nothing changes.",
        Edit(SAMPLE, SOFTMAX, "torch.softmax(logits.to(compute), dim=-1) / temperature"),
    ),
    Fault(
        S,
        "small-temperature-instead-of-zero",
        "temperature-zero",
        "Temperature 0 is replaced by a small one, and noise is heard.",
        Edit(SAMPLE, "return greedy(logits)", "temperature = 0.1"),
    ),
    Fault(
        S,
        "noise-multiplied",
        "sampling-noise-misused",
        "Probabilities are multiplied by the exponentials.",
        Edit(SAMPLE, "probabilities / exponentials", "probabilities * exponentials"),
    ),
    Fault(
        S,
        "noise-added-to-logits",
        "sampling-noise-misused",
        "Exponentials are added as if they were Gumbel noise.",
        Edit(SAMPLE, "probabilities / exponentials.to(compute)", "probabilities.log() + exponentials.to(compute)"),
    ),
    Fault(
        S,
        "likeliest-token",
        "sampling-noise-ignored",
        "The likeliest token is drawn, whatever the noise.",
        Edit(SAMPLE, "(probabilities / exponentials.to(compute))", "probabilities"),
    ),
    Fault(
        S,
        "probabilities-in-bf16",
        "sampling-in-bf16",
        "Probabilities are rounded to bf16.",
        Edit(SAMPLE, SOFTMAX, f"arithmetic.as_bf16({SOFTMAX})"),
    ),
    Fault(
        S,
        "logits-in-bf16",
        "sampling-in-bf16",
        "Scaled logits are rounded to bf16.",
        Edit(SAMPLE, "logits.to(compute) / temperature", "arithmetic.as_bf16(logits.to(compute) / temperature)"),
    ),
    Fault(
        S,
        "exponential-not-shifted",
        "sampling-overflows",
        "The softmax does not subtract the largest logit.",
        Edit(
            SAMPLE,
            SOFTMAX,
            "torch.exp(logits.to(compute) / temperature)\n"
            "    probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)",
        ),
    ),
    Fault(
        S,
        "uniform-noise",
        "sampling-noise-distribution",
        "Probabilities are divided by uniform numbers.",
        Edit(DRAWS, ".exponential_(generator=generator)", ".uniform_(generator=generator)"),
    ),
    Fault(
        S,
        "exponentials-of-rate-two-thirds-power",
        "sampling-noise-distribution",
        "Noise that is nearly exponential: a power of it.",
        Edit(DRAWS, ".exponential_(generator=generator)", ".exponential_(generator=generator).pow(0.9)"),
    ),
    Fault(
        S,
        "noise-of-first-request",
        "sampling-draws-repeated",
        "All requests of a batch share their noise.",
        Edit(
            DRAWS,
            "    drawn.append(",
            "    exponentials = exponentials.view(batch_size, now, -1)[:1].expand(batch_size, now, -1)"
            ".reshape(repeated.shape)\n        drawn.append(",
        ),
    ),
    Fault(
        S,
        "noise-of-step-before",
        "sampling-draws-repeated",
        "Every second step uses the noise of the one before.",
        Edit(
            DRAWS,
            "    drawn.append(",
            "    exponentials[1::2] = exponentials[: exponentials.shape[0] // 2 * 2 : 2]\n        drawn.append(",
        ),
    ),
)
