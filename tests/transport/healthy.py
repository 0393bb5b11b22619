"""A harness in Python around the reference: `python healthy.py [--recipe]`.  It keeps to docs/protocol.md.

Messages and tensors are read and written here, by hand.  With `--recipe` it makes weights of the recipe itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from conformance.adapters.in_process import to_torch
from conformance.adapters.reference import Reference
from conformance.interface import METHODS, Stateful, Unsupported
from conformance.recipe import RecipeScale, RecipeTensor

torch.set_num_threads(1)

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def read_tensor(place: Mapping[str, Any]) -> torch.Tensor:
    with open(place["file"], "rb") as file:  # noqa: PTH123
        file.seek(place["offset"])
        raw = bytearray(file.read(place["bytes"]))
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(DTYPES[place["dtype"]]).reshape(place["shape"])


def write_results(path: str, results: Mapping[str, torch.Tensor]) -> dict[str, dict[str, str]]:
    header, data, listed = {}, b"", {}
    for name, value in results.items():
        value = value.detach().contiguous()
        logical = NAMES[value.dtype]
        raw = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        stored = "U8" if logical.startswith("F8") else logical
        header[name] = {
            "dtype": stored,
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
        listed[name] = {"name": name, "dtype": logical}
    encoded = json.dumps(header).encode()
    with open(path, "wb") as file:  # noqa: PTH123
        file.write(len(encoded).to_bytes(8, "little") + encoded + data)
    return listed


class Harness:
    """The conversation."""

    def __init__(self) -> None:
        self.implementation = Reference()
        self.objects: dict[str, Any] = {}

    def methods(self) -> list[str]:
        return [*METHODS, "runtime"]

    def argument(self, value: Mapping[str, Any]) -> Any:
        if "tensor" in value:
            return read_tensor(value["tensor"])
        if "weights" in value:
            return {name: self.weight(place) for name, place in value["weights"].items()}
        return self.objects[value["object"]] if "object" in value else value["value"]

    def weight(self, place: Mapping[str, Any]) -> torch.Tensor:
        if "recipe" not in place:
            return read_tensor(place)
        made = place["recipe"]
        shape = tuple(made["shape"])
        if made["kind"] == "scale":
            name = made["name"].removesuffix(".scale")
            return to_torch(RecipeScale(name, (shape[0], shape[1]), made["seed"], made["exponent"]).tensor())
        return to_torch(RecipeTensor(made["name"], made["kind"], shape, made["seed"], made["gain"]).tensor())

    def results(self, request: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        kind = request["kind"]
        if kind == "reset":
            self.objects.clear()
            return {}
        arguments = {name: self.argument(value) for name, value in request.get("arguments", {}).items()}
        if kind == "open":
            self.objects[request["object"]] = getattr(self.implementation, request["method"])(**arguments)
            return {}
        if kind == "call":
            found = getattr(self.implementation, request["method"])(**arguments)
            if request["method"] == "parameter_counts":
                return {name: torch.tensor(count) for name, count in found.items()}
            values = () if found is None else found if isinstance(found, tuple) else (found,)
            return dict(zip(request["returns"], values, strict=True))
        target: Stateful = self.objects[request["object"]]
        return target.step(**arguments) if kind == "step" else target.state()

    def run(self, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            results = self.results(message["request"])
        except Unsupported as reason:
            return {"status": "unsupported", "message": str(reason)}
        except Exception as error:
            return {"status": "error", "message": f"{type(error).__name__}: {error}"}
        return {"status": "ok", "results": write_results(message["results"], results) if results else {}}

    def reply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        command: Callable[[Mapping[str, Any]], dict[str, Any]] = getattr(self, message["command"])
        return {"seq": message["seq"], **command(message)}

    def start(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"status": "ok"}

    def describe(self, message: Mapping[str, Any]) -> dict[str, Any]:
        description: dict[str, Any] = {
            "name": "healthy",
            "version": "1",
            "language": "Python",
            "methods": self.methods(),
        }
        description["recipe"] = "--recipe" in sys.argv
        return {"status": "ok", "description": description}

    def stop(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"status": "ok"}

    def send(self, line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def serve(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            self.send(json.dumps(self.reply(message)))
            if message["command"] == "stop":
                return


if __name__ == "__main__":
    Harness().serve()
