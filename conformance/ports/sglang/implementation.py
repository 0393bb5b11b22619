"""SGLang as an implementation under test: each method runs SGLang's own function on the suite's arguments."""

from __future__ import annotations

import importlib.metadata

from conformance.interface import Description
from conformance.ports.sglang.engram import Engrams
from conformance.ports.sglang.vision import Vision


class SGLang(Engrams, Vision):
    """Parts of DeepSeek-V4.1 in SGLang, on the CPU: torch functions as they are, Triton kernels interpreted."""

    def describe(self) -> Description:
        """The version, and what of it runs."""
        return Description(
            name="sglang",
            version=importlib.metadata.version("sglang"),
            homepage="github.com/sgl-project/sglang",
            conventions={
                "what runs": "single modules without the engine; nothing that needs CUDA",
                "kernels": "Triton's interpreter with this suite's repairs",
                "fp8 linears": "the form with dequantised weights, which quantises its inputs",
                "compressor": "groups are put together by the adapter",
            },
        )
