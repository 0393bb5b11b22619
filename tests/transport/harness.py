"""A harness in a page, without any library: identities that are asked for by hand-made cases.

`python misbehaving.py TRAIT` answers in the same way except in one respect.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Tensors = Mapping[str, tuple[str, list[int], bytes]]
"""Stored dtype, shape and bytes by name."""


def read_tensor(place: Mapping[str, Any]) -> bytes:
    """The bytes of an argument."""
    with Path(place["file"]).open("rb") as file:
        file.seek(place["offset"])
        return file.read(place["bytes"])


def safetensors(tensors: Tensors) -> bytes:
    """A file of these tensors."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


class Harness:
    """Answers one message after the other.  Every method returns its input `x`."""

    methods = ("fake_quantize_fp8", "rms_norm", "compressor")

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """What is replied to one message, its number aside."""
        if message["command"] == "describe":
            return {"status": "ok", "description": {"name": "small", "version": "1", "methods": [*self.methods]}}
        if message["command"] == "run" and message["request"]["kind"] in ("call", "step"):
            return self.run(message["request"], message["results"])
        return {"status": "ok"}

    def run(self, request: dict[str, Any], results: str) -> dict[str, Any]:
        """Results of a call or a step."""
        place = request["arguments"]["x"]["tensor"]
        name = request.get("returns", ["latent"])[0]
        Path(results).write_bytes(safetensors({name: (place["dtype"], place["shape"], read_tensor(place))}))
        return {"status": "ok", "results": {name: {}}}

    def send(self, reply: dict[str, Any]) -> None:
        """Write one line."""
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()

    def serve(self) -> None:
        """Answer until the input ends."""
        for line in sys.stdin:
            message = json.loads(line)
            self.send({"seq": message["seq"], **self.answer(message)})


if __name__ == "__main__":
    Harness().serve()
