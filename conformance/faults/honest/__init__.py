"""Honest variants of the reference: right, but different where the specification leaves freedom."""

from conformance.faults.honest.conversations import CONVERSATIONS
from conformance.faults.honest.devices import DEVICES
from conformance.faults.honest.drafts import DRAFTS
from conformance.faults.honest.factors import FACTORS
from conformance.faults.honest.orders import ORDERS
from conformance.faults.honest.sampling import SAMPLING
from conformance.faults.honest.storage import STORAGE
from conformance.faults.honest.variant import HonestVariant
from conformance.faults.honest.vision import VISION

HONEST_VARIANTS: tuple[HonestVariant, ...] = (
    *ORDERS,
    *FACTORS,
    *DEVICES,
    *STORAGE,
    *VISION,
    *CONVERSATIONS,
    *DRAFTS,
    *SAMPLING,
)
"""All variants, by what they do differently: arithmetic, storage and lists, and how requests are put together."""

NOISE_NAMES = (
    "float32",
    "float64",
    "sums-reversed",
    "sums-split-in-4",
    "exponentials-by-exp2",
    "ties-earliest",
    "ties-latest",
    "list-blocks-of-16",
    "list-blocks-of-32",
    "final-maximum",
    "sink-in-maximum",
    "list-split-and-merged",
    "maximum-lags-behind",
)

NOISE_VARIANTS: tuple[HonestVariant, ...] = tuple(variant for variant in HONEST_VARIANTS if variant.name in NOISE_NAMES)
"""Those from which noise floors are measured: few, because every `propagated` case runs them all."""

__all__ = ["HONEST_VARIANTS", "NOISE_VARIANTS", "HonestVariant"]
