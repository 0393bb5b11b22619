"""Compile every kernel specialisation that the launchers use for one target, without a GPU.

    python ci/aot/compile.py sm_90        prints one JSON line a specialisation

A specialisation that does not compile is a line with an `error`.  `gate.py` runs this, one process a target.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
# Both are read when the kernels are imported.
os.environ["TRITON_INTERPRET"] = "0"
os.environ["OPTIMIZED_PLAN_FOR"] = sys.argv[1]

import launches  # noqa: E402
import stateful_launches  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages")
NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Specialisation:
    """A kernel with the types and compile-time constants of one launch."""

    def __init__(self, kernel: JITFunction, plan: str, arguments: dict[str, Any], options: dict[str, int]) -> None:
        self.kernel, self.plan, self.options = kernel, plan, options
        constant = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
        self.constants = {name: value for name, value in arguments.items() if name in constant}
        self.signature = {name: "constexpr" if name in constant else _type(value) for name, value in arguments.items()}
        self.divisible = {name for name, value in arguments.items() if name not in constant and _divisible(value)}

    @property
    def kernel_name(self) -> str:
        """Module and function."""
        return f"{self.kernel.fn.__module__.rpartition('.')[2]}.{self.kernel.fn.__name__}"

    @property
    def key(self) -> str:
        """What makes it different from another specialisation of the kernel."""
        words = [self.kernel_name, self.signature, self.constants, sorted(self.divisible), self.options]
        return json.dumps(words, sort_keys=True)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _divisible(value: Any) -> bool:
    """Pointers of fresh tensors are aligned; Triton specialises integers that 16 divides."""
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def planned() -> list[Specialisation]:
    """The specialisations of every plan, each once."""
    found: dict[str, Specialisation] = {}
    current = ""

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        options = {name: keywords.pop(name) for name in OPTIONS if name in keywords}
        arguments = dict(zip(self.arg_names, args, strict=False)) | keywords
        ordered = {name: arguments[name] for name in self.arg_names}
        made = Specialisation(self, current, ordered, options)
        found.setdefault(made.key, made)

    JITFunction.run = record  # type: ignore[method-assign]
    for plan in (*launches.PLANS, *stateful_launches.PLANS):
        current = plan.name
        plan.call()
    return list(found.values())


def compiled(made: Specialisation, target: GPUTarget) -> dict[str, Any]:
    """Resources and matrix instructions of a compiled specialisation."""
    names = list(made.signature)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in made.divisible}
    source = ASTSource(fn=made.kernel, signature=made.signature, constexprs=made.constants, attrs=attributes)
    kernel = triton.compile(source, target=target, options={"enable_fp_fusion": False, **made.options})
    shared = kernel.metadata.shared
    if target.backend == "hip":
        text = kernel.asm["amdgcn"]
        spilled = _number(r"\.vgpr_spill_count:\s*(\d+)", text) + _number(
            r"\.private_segment_fixed_size:\s*(\d+)", text
        )
        return {
            "registers": _number(r"\.vgpr_count:\s*(\d+)", text),
            "stack": spilled,
            "shared": shared,
            "matrix": sorted(set(re.findall(r"v_mfma_\w+", text))),
        }
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    return {
        "registers": _number(r"REG:(\d+)", usage),
        "stack": _number(r"STACK:(\d+)", usage),
        "shared": shared,
        "matrix": sorted(set(re.findall(r"\b(?:H|HG|QG|IG|UTC\w)MMA\b[\w.]*", code))),
    }


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([NVIDIA_TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern!r} in the compiler's output")
    return int(found[1])


def main() -> None:
    """Compile for the target that the command line names."""
    target = TARGETS[sys.argv[1]]
    for made in planned():
        line: dict[str, Any] = {
            "kernel": made.kernel_name,
            "plan": made.plan,
            "constants": made.constants | made.options,
        }
        try:
            line |= compiled(made, target)
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
