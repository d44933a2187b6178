"""A page in headless Chromium, as a visitor sees it: driven over a pipe, so that nothing listens anywhere."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
LIMIT_S = 60.0


def chromium() -> str | None:
    """The browser's command; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Visit:
    """What a visit has brought.

    Attributes:
        complaints: what the console, the log or a script said.
        requests: addresses that were asked for, but for those that hold their content themselves.
        width, content_width: of the window without its scroll bar, and of what is in it, in CSS pixels.
        pictures: natural width and shown width of every image.
        picture: the whole page, PNG.
    """

    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    width: int = 0
    content_width: int = 0
    pictures: list[list[float]] = field(default_factory=list)
    picture: bytes = b""


class Browser:
    """One process. Messages are JSON with a NUL between them, over its descriptors 3 and 4."""

    def __init__(self, command: str, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
        ]
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", command, *options],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._rest = b""
        self._events: list[dict[str, Any]] = []

    def close(self) -> None:
        os.close(self._write)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._process.kill()
        self._process.wait()
        os.close(self._read)

    def visit(self, page: Path, width: int, height: int) -> Visit:
        """Opens a page in a new tab of this size; below 600 pixels it is a phone's."""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

        def ask(method: str, **parameters: Any) -> dict[str, Any]:
            return self._ask(method, session, **parameters)

        for domain in ("Page", "Runtime", "Log", "Network"):
            ask(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        ask("Emulation.setDeviceMetricsOverride", **size)
        ask("Page.navigate", url=page.resolve().as_uri())
        self._await("Page.loadEventFired")
        found = ask(
            "Runtime.evaluate",
            returnByValue=True,
            expression="JSON.stringify([document.documentElement.clientWidth, document.documentElement.scrollWidth, "
            "[...document.images].map(each => [each.naturalWidth, each.clientWidth])])",
        )
        seen = Visit()
        seen.width, seen.content_width, seen.pictures = json.loads(found["result"]["value"])
        seen.picture = base64.b64decode(ask("Page.captureScreenshot", captureBeyondViewport=True, format="png")["data"])
        for event in self._events:
            self._judge(event, seen)
        self._events.clear()
        self._ask("Target.closeTarget", targetId=target)
        return seen

    @staticmethod
    def _judge(event: dict[str, Any], seen: Visit) -> None:
        method, facts = event["method"], event.get("params", {})
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            seen.complaints.append(json.dumps(facts))
        elif method == "Network.requestWillBeSent" and not facts["request"]["url"].startswith("data:"):
            seen.requests.append(facts["request"]["url"])

    # -- messages --------------------------------------------------------------------------------------------------

    def _ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
        raise AssertionError("the browser ended")

    def _await(self, method: str) -> None:
        if any(event["method"] == method for event in self._events):
            return
        for message in self._messages():
            if message.get("method") == method:
                return

    def _messages(self) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + LIMIT_S
        while True:
            while b"\0" in self._rest:
                content, _, self._rest = self._rest.partition(b"\0")
                message = json.loads(content)
                if "method" in message:
                    self._events.append(message)
                yield message
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"the browser did not answer within {LIMIT_S:.0f} s")
            read = os.read(self._read, 1 << 20)
            if not read:
                return
            self._rest += read


@contextlib.contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """A browser, while it is needed."""
    command = chromium()
    assert command is not None
    browser = Browser(command, profile)
    try:
        yield browser
    finally:
        browser.close()
