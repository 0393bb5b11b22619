"""What kernels are compared with beside targets: torch's compiler, torch's attention, the published kernels.

None is trusted: like everything else they pass the gate before they get a number.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from conformance import __version__
from conformance.adapters.in_process import InProcess
from conformance.adapters.target import UPSTREAM_PREFIX, open_target
from conformance.bench.devices import Device
from conformance.bench.subjects import Subject, device_as_default
from conformance.errors import ConformanceError, TargetError
from conformance.interface import METHODS, Array, Config, Description, Implementation
from conformance.recording import upstream as declared
from conformance.recording.checkout import Checkout, imported
from conformance.recording.record import blaming, torch_settings

COMPILERS = ("c++", "g++", "clang++")
COMPILED = "torch.compile"
SDPA = "sdpa"


class CompiledReference(Implementation):
    """The reference, each method handed to `torch.compile`."""

    def __init__(self) -> None:
        session = open_target("reference")
        assert isinstance(session, InProcess)
        reference = session.implementation
        for name in METHODS:
            setattr(self, name, torch.compile(getattr(reference, name), dynamic=False))

    def describe(self) -> Description:
        """The compiler's version."""
        return Description(COMPILED, torch.__version__, conventions={"of": f"reference {__version__}"})


def compiled(device: Device) -> Subject:
    """The compiled reference.

    Raises:
        TargetError: on a CPU there is no C++ compiler.
    """
    if device.kind == "cpu":
        wanted = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), "")
        if not wanted or shutil.which(wanted) is None:
            raise TargetError(
                f"{COMPILED}: on a CPU it needs a C++ compiler: none of {', '.join(COMPILERS)} is installed"
            )
    # The rounding points of the equations are part of them; by default the compiler leaves out pairs of casts.
    torch._inductor.config.emulate_precision_casts = True
    # What it cannot compile is reported as any other exception, not with pages of its graph.
    for name in ("torch._inductor", "torch._dynamo"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    made = CompiledReference()
    return Subject(COMPILED, made, made.describe(), device, device_as_default(device), torch.compiler.reset)


class SdpaAttention(Implementation):
    """Sparse attention by `torch.nn.functional.scaled_dot_product_attention`.

    The listed rows are gathered; the sink is one more key of zeros, with a mask that gives it the sink's score, and a
    value of zeros.
    """

    def describe(self) -> Description:
        """torch's version."""
        return Description(SDPA, torch.__version__)

    def sparse_attention(self, q: Array, kv: Array, indices: Array, sink: Array, scale: float) -> Array:
        """Attention over listed rows."""
        batch, length, heads, width = q.shape
        listed = indices.shape[-1]
        queries = batch * length
        places = indices.long().clamp(min=0) + torch.arange(batch, device=q.device)[:, None, None] * kv.shape[1]
        rows = torch.nn.functional.pad(kv.flatten(0, 1)[places].flatten(0, 1), (0, 0, 0, 1)).float()
        mask = torch.zeros(queries, heads, 1, listed + 1, device=q.device)
        mask[..., :listed].masked_fill_((indices < 0).reshape(queries, 1, 1, listed), -torch.inf)
        mask[..., listed:] = sink.reshape(1, heads, 1, 1)
        # A mask has the type of the operands, and bf16 has too few bits for a sink: all of it is fp32.
        keys = rows.unsqueeze(1).expand(queries, heads, listed + 1, width)
        out = torch.nn.functional.scaled_dot_product_attention(
            q.reshape(queries, heads, 1, width).float(), keys, keys, attn_mask=mask, scale=scale
        )
        return out.to(q.dtype).reshape(q.shape)


def sdpa(device: Device) -> Subject:
    """torch's attention."""
    made = SdpaAttention()
    return Subject(SDPA, made, made.describe(), device)


PEERS: Mapping[str, Callable[[Device], Subject]] = {COMPILED: compiled, SDPA: sdpa}
"""By name; anything else is a target."""


class PublishedKernels(Implementation):
    """The kernels of a checkout of the published code, as its model calls them."""

    def __init__(self, kernel: ModuleType, version: str) -> None:
        self._kernel: Any = kernel
        self._version = version

    def describe(self) -> Description:
        """The hash of `kernel.py`."""
        return Description(f"{declared.REPOSITORY} kernels", self._version)

    def quantize_fp8(self, x: Array) -> tuple[Array, Array]:
        """Q8."""
        codes, scales = self._kernel.act_quant(x, 32, "ue8m0", torch.float8_e8m0fnu)
        return codes, scales

    def quantize_fp4_e8m0(self, x: Array) -> tuple[Array, Array]:
        """Q4-E8M0."""
        codes, scales = self._kernel.fp4_act_quant(x, 32)
        return codes.view(torch.uint8), scales

    def quantize_fp4_e4m3(self, x: Array) -> tuple[Array, Array]:
        """Q4-E4M3."""
        codes, scales = self._kernel.fp4_act_quant(x, 16)
        return codes.view(torch.uint8), scales

    def linear_fp8(self, x: Array, weight: Array, scale: Array) -> Array:
        """FP8 weight."""
        return self._kernel.fp8_gemm(*self.quantize_fp8(x), weight, scale, torch.float8_e8m0fnu)

    def linear_fp4(self, x: Array, weight: Array, scale: Array) -> Array:
        """FP4 weight."""
        return self._kernel.fp4_gemm(*self.quantize_fp8(x), weight, scale, torch.float8_e8m0fnu)

    def sparse_attention(self, q: Array, kv: Array, indices: Array, sink: Array, scale: float) -> Array:
        """Attention over listed rows."""
        return self._kernel.sparse_attn(q, kv, sink, indices, scale)

    def hyper_connection_coefficients(
        self, config: Config, h: Array, fn: Array, scale: Array, base: Array
    ) -> tuple[Array, Array, Array]:
        """The projection by torch, as the model has it; the rounds by the kernel."""
        flat = h.flatten(-2).float()
        inverse_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + config["norm_eps"])
        mixes = torch.nn.functional.linear(flat, fn) * inverse_rms
        sizes = config["hc_mult"], config["hc_sinkhorn_iters"], config["hc_eps"]
        pre, post, comb = self._kernel.hc_split_sinkhorn(mixes, scale, base, *sizes)
        return pre, post, comb


def upstream(target: str, device: Device, agreed: bool) -> Subject:
    """The kernels of the checkout that a target names, after showing what will be executed.

    Raises:
        TargetError: no such checkout, no kernel.py in it, the user has not agreed, or it cannot be imported here.
    """
    file = f"{declared.KERNEL}.py"
    try:
        checkout = Checkout.read(Path(target.removeprefix(UPSTREAM_PREFIX)))
        for line in checkout.notice(own_kernels=False):
            print(line, file=sys.stderr)
        if file not in checkout.files:
            raise TargetError(f"no {file} in it")
        if not agreed:
            raise TargetError("nothing was executed: read the code, then say --yes")
        found: list[ModuleType] = []

        def keep(kernel: ModuleType) -> ModuleType:
            found.append(kernel)
            return kernel

        with blaming(), torch_settings(device.kind), imported(checkout, None, keep):
            pass
    except ConformanceError as error:
        raise TargetError(f"target {target!r}: {error}") from error
    made = PublishedKernels(found[0], checkout.files[file].sha256[:12])
    return Subject(target, made, made.describe(), device, _published_default)


@contextmanager
def _published_default() -> Iterator[None]:
    """The published code makes its results in torch's default type, which its model sets."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, declared.DEFAULT_DTYPE))
    try:
        yield
    finally:
        torch.set_default_dtype(before)
