"""Kernels are interpreted where there is no GPU, which Triton decides when it is imported: `optimized` comes first."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("triton") is not None:
    import optimized.device  # noqa: F401

    collect_ignore_glob: list[str] = []
else:
    # Triton has no build for this platform; the adapter says so to who asks for the kernels.
    collect_ignore_glob = ["test_*.py"]
