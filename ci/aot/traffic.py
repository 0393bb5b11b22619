"""Count what every kernel asks of memory, by interpreting the launches at small sizes, without a GPU.

    python ci/aot/traffic.py              prints one JSON line a launch

Each load and store of each program is seen with its addresses: masked elements are left out, and elements of one load
that share an address count once.  `once` is what the same launch would move if every byte that it touches were read
once and written once; a kernel that reads something twice moves more.  Tiles are those of `TILES_OF`, sizes those that
`launches.py` has for this.  `gate.py` runs this.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
# Both are read when the kernels and the plans are imported.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["LAUNCH_SIZES"] = "small"

from optimized import device  # noqa: E402

TILES_OF = "sm_90"
# Launchers choose tiles by these two when they are imported; the interpreter has been set up by now.
device.INTERPRETED, device.CAPABILITY = False, replace(device.CAPABILITY, architecture=TILES_OF)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

SEED = 20_261_130
Line = dict[str, Any]


Addresses = np.ndarray[Any, Any]


class Accesses:
    """Loads, or stores, of one launch.

    Attributes:
        moved: bytes of all of them.
    """

    def __init__(self) -> None:
        self.moved = 0
        self._places: dict[int, list[Addresses]] = {}

    def add(self, addresses: Addresses, size: int) -> None:
        """Elements of `size` bytes, no two at the same address."""
        self.moved += addresses.size * size
        self._places.setdefault(size, []).append(addresses)

    @property
    def touched(self) -> int:
        """Bytes of the different elements."""
        return sum(np.unique(np.concatenate(places)).size * size for size, places in self._places.items())


@dataclass
class Launch:
    """What one launch has asked for so far; `products` are multiplications of `tl.dot`."""

    loads: Accesses = field(default_factory=Accesses)
    stores: Accesses = field(default_factory=Accesses)
    products: int = 0

    def line(self) -> Line:
        """Bytes moved, bytes touched, and how often the average one is moved."""
        read, written, once = self.loads.moved, self.stores.moved, self.loads.touched + self.stores.touched
        ratio = round((read + written) / once, 3) if once else 1.0
        return {"read": read, "written": written, "once": once, "ratio": ratio, "products": self.products}


@contextmanager
def watched(begin: Callable[[Any, dict[str, Any]], Launch]) -> Iterator[None]:
    """Every launch of a kernel is reported to `begin`, whose answer then hears of its loads, stores and products."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    run, shipped_load, shipped_store = executor.__call__, builder.create_masked_load, builder.create_masked_store
    shipped_atomic, shipped_dot = builder.create_atomic_rmw, builder.create_dot
    current = Launch()

    def launch(self: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal current
        given = dict(zip(self.arg_names, arguments, strict=False)) | keywords
        current = begin(self.fn, {name: given[name] for name in self.constexprs if name in given})
        return run(self, *arguments, **keywords)

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        current.loads.add(_chosen(pointers, mask), _size(pointers))
        return shipped_load(self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        current.stores.add(_chosen(pointers, mask), _size(pointers))
        return shipped_store(self, pointers, value, mask, *rest)

    def atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        current.loads.add(_chosen(pointers, mask), _size(pointers))
        current.stores.add(_chosen(pointers, mask), _size(pointers))
        return shipped_atomic(self, operation, pointers, value, mask, *rest)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        current.products += a.data.size * b.data.shape[-1]
        return shipped_dot(self, a, b, *rest)

    with (
        mock.patch.object(executor, "__call__", launch),
        mock.patch.multiple(
            builder,
            create_masked_load=load,
            create_masked_store=store,
            create_atomic_rmw=atomic,
            create_dot=dot,
        ),
    ):
        yield


def _chosen(pointers: Any, mask: Any) -> Addresses:
    return np.unique(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)])


def _size(pointers: Any) -> int:
    return max(1, int(pointers.get_element_ty().primitive_bitwidth) // 8)


def counted(plan: str, call: Callable[[], object]) -> list[Line]:
    """The launches of one call, in their order."""
    launches: list[tuple[Line, Launch]] = []

    def begin(function: Any, constants: dict[str, Any]) -> Launch:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        launches.append(({"kernel": name, "plan": plan, "constants": constants}, Launch()))
        return launches[-1][1]

    with watched(begin):
        call()
    return [about | launch.line() for about, launch in launches]


@contextmanager
def filled() -> Iterator[None]:
    """Plans make tensors without data; here they hold small numbers, always the same, integers below every bound."""
    random = torch.Generator().manual_seed(SEED)
    empty = torch.empty

    def made(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        if tensor.dtype in (torch.int32, torch.int64):
            return tensor.copy_((torch.arange(tensor.numel()) % 8).view(tensor.shape))
        if tensor.element_size() == 1:
            # Around one as a power of two, and finite as any other float.
            codes = torch.randint(0x30, 0x70, tensor.shape, generator=random, dtype=torch.uint8)
            if tensor.dtype == torch.float8_e8m0fnu:
                codes = codes % 4 + 126
            tensor.view(torch.uint8).copy_(codes)
            return tensor
        return tensor.copy_(torch.randn(tensor.shape, generator=random))

    with mock.patch.object(torch, "empty", made):
        yield


def main() -> None:
    """Count every plan."""
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    import launches
    import stateful_launches

    for plan in (*launches.PLANS, *stateful_launches.PLANS):
        with filled():
            lines = counted(plan.name, plan.call)
        for line in lines:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
