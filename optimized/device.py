"""Where kernels run: compiled on a GPU, interpreted on the CPU where there is none.

Import this module before anything imports Triton: Triton decides at its import whether kernels are interpreted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

Choice = TypeVar("Choice")

PLAN_FOR = "OPTIMIZED_PLAN_FOR"
"""Environment variable: the architecture that launches are planned for on a machine without a GPU."""


def _interpret() -> bool:
    """Whether kernels are interpreted in this process; without a GPU there is no other way to run them."""
    if "TRITON_INTERPRET" in os.environ:
        return os.environ["TRITON_INTERPRET"] == "1"
    if torch.cuda.is_available():
        return False
    if "triton" in sys.modules:
        raise ImportError("triton was imported before optimized: set TRITON_INTERPRET=1 to run without a GPU")
    os.environ["TRITON_INTERPRET"] = "1"
    return True


INTERPRETED = _interpret()

# Fused multiply-adds would change the bits of quantisers; where they are welcome a kernel writes tl.fma.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")

if INTERPRETED:
    from optimized import interpreter

    interpreter.install()


@dataclass(frozen=True)
class Capability:
    """What the device of this process may run."""

    device: str
    """The torch device that tensors live on: "cuda" or "cpu"."""
    name: str
    architecture: str
    """"interpreted", "sm_90", "gfx942", ..."""
    native_fp8: bool
    """Casts between fp32 and E4M3 are instructions."""


def capability() -> Capability:
    """Describe the device."""
    if INTERPRETED:
        return Capability("cpu", "Triton interpreter", "interpreted", native_fp8=False)
    if not torch.cuda.is_available():
        # TRITON_INTERPRET=0 without a GPU: launchers run on tensors without data, to see what they would launch.
        architecture = os.environ.get(PLAN_FOR, "sm_90")
        return Capability("meta", "none, launches are only planned", architecture, native_fp8=False)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip:
        architecture = properties.gcnArchName.split(":")[0]
        return Capability("cuda", properties.name, architecture, native_fp8=False)
    version = properties.major * 10 + properties.minor
    return Capability("cuda", properties.name, f"sm_{version}", native_fp8=version >= 89)


CAPABILITY = capability()
DEVICE = torch.device(CAPABILITY.device)

TARGET_PROGRAMS = 264
"""Two programs for each of the 132 multiprocessors of an H100 or H200."""


def for_device(choices: Mapping[str, Choice]) -> Choice:
    """What a table of launch parameters holds for this device: by architecture, then by vendor, then for "any".

    Keys are architectures, "interpreted", "sm" (NVIDIA), "gfx" (AMD) and "any".
    """
    architecture = CAPABILITY.architecture
    vendor = "gfx" if architecture.startswith("gfx") else "sm" if architecture.startswith("sm_") else architecture
    return next(choices[key] for key in (architecture, vendor, "any") if key in choices)
