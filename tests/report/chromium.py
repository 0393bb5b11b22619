"""A headless Chromium, driven over its debugging pipe: what a page looks like, says and logs in a real browser."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
    """The path of a Chromium on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page."""

    def __init__(self, executable: str, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [executable, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += ["--hide-scrollbars", f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        # Chromium reads its commands from file descriptor 3 and answers on 4.
        joined = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", joined, "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.log: list[str] = []
        """What the page logged: console messages, errors, refused or failed requests."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        number = self._number
        answer = self._until(lambda event: event.get("id") == number)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path, width: int, height: int = 900, dark: bool = False) -> float:
        """Open a file at a size and colour scheme; the seconds until it was loaded and laid out."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.log.clear()
        start = time.perf_counter()
        self.send("Page.navigate", url=path.resolve().as_uri())
        self._until(lambda event: event.get("method") == "Page.loadEventFired")
        self.evaluate("document.body.getBoundingClientRect().height")
        return time.perf_counter() - start

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def accessible(self) -> list[tuple[str, str]]:
        """Role and name of everything that assistive technology is told of."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        shown = [node for node in nodes if not node.get("ignored")]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in shown]

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write a PNG of what is visible, or of the whole page."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def _until(self, wanted: Any) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while True:
            while b"\0" not in self._buffer:
                ready, _, _ = select.select([self._read], [], [], max(deadline - time.monotonic(), 0))
                assert ready, f"Chromium has not answered for {PATIENCE:.0f} s"
                received = os.read(self._read, 1 << 20)
                assert received, "Chromium has ended"
                self._buffer += received
            raw, self._buffer = self._buffer.split(b"\0", 1)
            event: dict[str, Any] = json.loads(raw)
            self._note(event)
            if wanted(event):
                return event

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Log.entryAdded":
                self.log.append(parameters["entry"]["text"])
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Network.loadingFailed":
                self.log.append(json.dumps(parameters)[:500])
            case "Network.requestWillBeSent" if not parameters["request"]["url"].startswith(("file:", "data:")):
                self.log.append(f"request of {parameters['request']['url']}")
