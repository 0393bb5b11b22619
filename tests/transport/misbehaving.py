"""Harnesses that misbehave in one respect: `python misbehaving.py TRAIT`.

A trait shows in `fake_quantize_fp8` alone, unless it is about the start or the end, so that the cases before and after
tell whether the run goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness import Harness, safetensors

Request = dict[str, Any]
Reply = dict[str, Any]
OK: Mapping[str, Any] = {"status": "ok", "results": {"values": {}}}


def say(raw: bytes) -> None:
    os.write(1, raw)


def forever(*_: Any) -> Reply:
    while True:
        time.sleep(1000)


def hang_and_ignore_signals(*_: Any) -> Reply:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return forever()


def die_by_signal(*_: Any) -> Reply:
    os.kill(os.getpid(), signal.SIGSEGV)
    return forever()


def exit_early(*_: Any) -> Reply:
    os._exit(0)


def exit_with_a_word(*_: Any) -> Reply:
    sys.stderr.write("loading\nout of memory: 3 GiB \x1b[31mwanted\n")
    sys.stderr.flush()
    os._exit(3)


def junk(*_: Any) -> Reply:
    say(b"Loading checkpoint shards: 100%\n")
    return forever()


def not_utf8(*_: Any) -> Reply:
    say(b"\xff\xfe{}\n")
    return forever()


def two_lines(*_: Any) -> Reply:
    say(b'{"seq": 4, "status": "ok"}\n{"seq": 5, "status": "ok"}\n')
    return forever()


def deep_json(*_: Any) -> Reply:
    say(b"[" * 500_000 + b"\n")
    return forever()


def megabytes_without_newline(*_: Any) -> Reply:
    for _ in range(64):
        os.write(1, b"x" * (1 << 20))
    return forever()


def close_output_and_live(*_: Any) -> Reply:
    os.close(1)
    return forever()


def flood_errors(request: Request, results: str) -> Reply:
    for _ in range(64):
        os.write(2, b"warning\n" * (1 << 17))
    return Harness().run(request, results)


def leave_children(request: Request, results: str) -> Reply:
    mark = os.environ["TRANSPORT_TEST"]
    sleep = [sys.executable, "-S", "-c", f"import time; time.sleep(1000)  # {mark}"]
    subprocess.Popen(sleep, env={})
    subprocess.Popen(sleep, start_new_session=True)
    return Harness().run(request, results)


def die_and_leave_children(request: Request, results: str) -> Reply:
    leave_children(request, results)
    os._exit(1)


def symbolic_link(request: Request, results: str) -> Reply:
    elsewhere = Path(results + ".elsewhere")
    reply = Harness().run(request, str(elsewhere))
    Path(results).symlink_to(elsewhere)
    return reply


def linked_folder(request: Request, results: str) -> Reply:
    folder = Path(results).parent
    moved = folder.rename(folder.with_name("moved"))
    folder.symlink_to(moved)
    return Harness().run(request, results)


def named_pipe(request: Request, results: str) -> Reply:
    os.mkfifo(results)
    return {**OK}


def folder_instead_of_file(request: Request, results: str) -> Reply:
    Path(results).mkdir()
    (Path(results) / "inner").write_text("x")
    return {**OK}


def write_elsewhere(request: Request, results: str) -> Reply:
    elsewhere = Path(results + ".elsewhere")
    return {**Harness().run(request, str(elsewhere)), "file": str(elsewhere)}


def remove_folder(request: Request, results: str) -> Reply:
    shutil.rmtree(Path(results).parent)
    return {**OK}


def modify_input(request: Request, results: str) -> Reply:
    reply = Harness().run(request, results)
    file = Path(request["arguments"]["x"]["tensor"]["file"])
    file.chmod(0o600)
    raw = file.read_bytes()
    file.write_bytes(raw[:-2] + b"\0\0")
    return reply


def writing(raw: bytes) -> Callable[[Request, str], Reply]:
    def run(request: Request, results: str) -> Reply:
        Path(results).write_bytes(raw)
        return {**OK}

    return run


def returning(dtype: str, shape: list[int], raw: bytes) -> Callable[[Request, str], Reply]:
    return writing(safetensors({"values": (dtype, shape, raw)}))


def huge_file(request: Request, results: str) -> Reply:
    with Path(results).open("wb") as file:
        file.truncate(1 << 40)
    return {**OK}


def answering(reply: Mapping[str, Any]) -> Callable[[Request, str], Reply]:
    return lambda request, results: dict(reply)


def overlapping() -> bytes:
    entry = {"dtype": "BF16", "shape": [2, 4], "data_offsets": [0, 16]}
    encoded = json.dumps({"values": entry, "other": entry}).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(16)


X = ("BF16", [2, 4])
TRAITS: Mapping[str, Callable[[Request, str], Reply]] = {
    "healthy": Harness().run,
    "hangs": forever,
    "ignores-signals": hang_and_ignore_signals,
    "dies-by-signal": die_by_signal,
    "starts-once": die_by_signal,
    "exits-midway": exit_early,
    "exits-with-a-word": exit_with_a_word,
    "junk": junk,
    "not-utf-8": not_utf8,
    "deep-json": deep_json,
    "two-lines": two_lines,
    "megabytes-without-newline": megabytes_without_newline,
    "closes-output": close_output_and_live,
    "floods-errors": flood_errors,
    "leaves-children": leave_children,
    "dies-and-leaves-children": die_and_leave_children,
    "symbolic-link": symbolic_link,
    "linked-folder": linked_folder,
    "named-pipe": named_pipe,
    "folder-instead-of-file": folder_instead_of_file,
    "writes-elsewhere": write_elsewhere,
    "removes-folder": remove_folder,
    "modifies-input": modify_input,
    "huge-file": huge_file,
    "huge-header": writing((1 << 62).to_bytes(8, "little") + b"{}"),
    "long-header": writing((1 << 21).to_bytes(8, "little") + b" " * (1 << 21)),
    "overlapping-tensors": writing(overlapping()),
    "truncated-file": writing(safetensors({"values": (*X, bytes(16))})[:-1]),
    "empty-file": writing(b""),
    "wrong-dtype": returning("I32", [2, 4], bytes(32)),
    "unknown-dtype": returning("F8_E5M2", [2, 4], bytes(8)),
    "wrong-shape": returning("BF16", [8], bytes(16)),
    "nan": returning("BF16", [2, 4], b"\xc0\x7f" * 8),
    "missing-result": answering({"status": "ok", "results": {}}),
    "missing-tensor": writing(safetensors({"other": (*X, bytes(16))})),
    "unsupported": answering({"status": "unsupported", "message": "no [64] columns"}),
    "error": answering({"status": "error", "message": "kernel\nfailed"}),
    "unknown-status": answering({"status": "perhaps"}),
    "wrong-type": answering({"status": "ok", "results": ["values"]}),
}


class Misbehaving(Harness):
    def __init__(self, trait: str) -> None:
        self.trait = trait
        self.asked = ""

    def answer(self, message: dict[str, Any]) -> Reply:
        self.asked = message.get("request", {}).get("method", message["command"])
        if self.trait in ("hangs-at-start", "hangs-at-stop") and self.asked == self.trait.rpartition("-")[2]:
            return forever()
        if self.trait == "starts-once" and self.asked == "start":
            started = Path(sys.argv[2])
            if started.exists():
                return exit_with_a_word()
            started.touch()
        return super().answer(message)

    def run(self, request: Request, results: str) -> Reply:
        bad = request.get("method") == "fake_quantize_fp8"
        return (
            TRAITS.get(self.trait, Harness.run.__get__(self))(request, results)
            if bad
            else super().run(request, results)
        )

    def send(self, reply: Reply) -> None:
        bad = self.asked == "fake_quantize_fp8"
        if bad and self.trait == "wrong-sequence-number":
            reply["seq"] -= 1
        if bad and self.trait == "huge-sequence-number":
            reply["seq"] = 10**400
        super().send(reply)
        if bad and self.trait == "answers-twice":
            super().send(reply)
        if bad and self.trait == "answers-again-later":
            time.sleep(0.2)
            super().send(reply)


if __name__ == "__main__":
    Misbehaving(sys.argv[1]).serve()
