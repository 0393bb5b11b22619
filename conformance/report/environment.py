"""What a run ran on: versions of libraries, device and driver, for the header of a report."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

LIBRARIES = ("numpy", "torch", "triton", "safetensors", "ml_dtypes")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def environment() -> Mapping[str, str]:
    """Python, platform, the libraries that are installed, and what torch says of accelerators if it is loaded.

    Nothing is imported for it: a port without torch stays without.
    """
    found = {"python": platform.python_version(), "platform": platform.platform(), "machine": platform.machine()}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found |= _accelerator(sys.modules.get("torch"))
    with suppress(OSError):
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 …"
        found["driver"] = " ".join(NVIDIA_DRIVER.read_text(encoding="utf-8").splitlines()[0].split())
    return found


def _accelerator(torch: Any) -> Mapping[str, str]:
    """Names of the GPUs and the version of their toolkit."""
    # A torch that is half built, or a driver that does not answer, is no reason not to judge.
    with suppress(Exception):
        if torch is not None and torch.cuda.is_available():
            names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
            toolkit = {"cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None)}
            versions = {name: str(version) for name, version in toolkit.items() if version}
            return {"devices": ", ".join(names), **versions}
    return {}
