"""Headless Chromium over its DevTools protocol.

What always holds: there is one tab, which every test finds empty and without storage, and which keeps everything that
its console, its security policy and its network complained of in `complaints`. Waiting is for a condition in the page,
never for a time. (A browser context for each test would cost half a second each.)
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-default-browser-check",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
STARTS_WITHIN_S = 60
WITHIN_S = 15
NETWORK_CHANGED = "net::ERR_NETWORK_CHANGED"
"""Chromium drops every connection, loopback ones too, when a network interface comes or goes: a container does that."""
KEYS = {"Enter": ("\r", 13), "Escape": ("", 27), "ArrowDown": ("", 40), "ArrowRight": ("", 39), "Tab": ("", 9)}


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium(program: str, profile: Path) -> Iterator[str]:
    """The web socket address of a browser that ends with the block."""
    with open(profile / "output.log", "wb") as log:
        command = [program, *FLAGS, f"--user-data-dir={profile / 'profile'}", "about:blank"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + STARTS_WITHIN_S
        told = profile / "profile" / "DevToolsActivePort"
        while not (told.exists() and len(lines := told.read_text().splitlines()) == 2):
            assert process.poll() is None, (profile / "output.log").read_text(errors="replace")[-2000:]
            assert time.monotonic() < deadline, "Chromium did not start"
            time.sleep(0.02)  # between two looks
        yield f"ws://127.0.0.1:{lines[0]}{lines[1]}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.complaints: list[str] = []
        """Console errors and warnings, uncaught exceptions, violations of the CSP, failed loads."""
        self.expected: list[str] = []
        """Parts of complaints that the test provokes."""

    def unexpected(self) -> list[str]:
        known = (*self.expected, NETWORK_CHANGED)
        return [line for line in self.complaints if not any(part in line for part in known)]

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session, **params)

    async def prepare(self) -> None:
        for domain in ("Runtime", "Page", "Log", "Audits"):
            await self.call(f"{domain}.enable")

    async def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        await self.resize(width, height)
        await self.call("Storage.clearDataForOrigin", origin=url.partition("#")[0].rstrip("/"), storageTypes="all")
        while True:
            await self.call("Page.navigate", url=url)
            await self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")
            if not any(NETWORK_CHANGED in line for line in self.complaints):
                return
            self.complaints = [line for line in self.complaints if NETWORK_CHANGED not in line]

    async def leave(self) -> None:
        await self.call("Page.navigate", url="about:blank")
        await self.wait("location.href === 'about:blank'")

    async def resize(self, width: int, height: int, scale: float = 1) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)

    async def media(self, **features: str) -> None:
        """`prefers_color_scheme="dark"` and such."""
        found = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=found)

    async def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def wait(self, expression: str, within_s: float = WITHIN_S) -> Any:
        """The first truthy value of `expression`."""
        deadline = time.monotonic() + within_s
        value = None
        while not value and time.monotonic() < deadline:
            with suppress(Gone):  # asked again in the new document
                value = await self.run(_looking(expression, deadline - time.monotonic()))
        if not value:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"not within {within_s} s: {expression}\n{text[:3000]}\n{self.complaints}")
        return value

    async def text(self, selector: str) -> str:
        found = json.dumps(selector)
        return str(await self.run(f"document.querySelector({found})?.innerText ?? '(nothing at ' + {found} + ')'"))

    async def wait_text(self, selector: str, part: str) -> str:
        await self.wait(f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(part)})")
        return await self.text(selector)

    async def go(self, hash_: str) -> None:
        await self.run(f"void (location.hash = {json.dumps(hash_)})")

    async def click(self, selector: str) -> None:
        await self.wait(f"document.querySelector({json.dumps(selector)})")
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        text, code = KEYS.get(key, (key, ord(key[0].upper())))
        about = {"key": key, "windowsVirtualKeyCode": code, **({"text": text} if text else {})}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **about)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def screenshot(self, path: Path, whole: bool = True) -> None:
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([part.get("value", part) for part in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Audits.issueAdded" and "contentSecurityPolicyIssueDetails" in params["issue"]["details"]:
            self.complaints.append(f"CSP: {params['issue']['details']}")


def _looking(expression: str, within_s: float) -> str:
    """JavaScript that looks at `expression` every few milliseconds and gives its first truthy value, or null."""
    return f"""(async () => {{
      const end = performance.now() + {1000 * within_s};
      while (performance.now() < end) {{
        const found = {expression};
        if (found) return found instanceof Node ? true : found;
        await new Promise((done) => setTimeout(done, 15));
      }}
      return null;
    }})()"""


class Gone(Exception):
    """The page navigated away under an expression."""


class Browser:
    """A connection to a running browser."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    async def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        await self._socket.send_json(message)
        async with asyncio.timeout(30):
            return dict(await answer)

    async def listen(self) -> None:
        async for message in self._socket:
            if message.type is not WSMsgType.TEXT:
                continue
            told = message.json()
            if "id" in told:
                answer = self._waiting.pop(told["id"])
                if "error" not in told:
                    answer.set_result(told["result"])
                elif "context" in told["error"]["message"].lower() or "navigat" in told["error"]["message"].lower():
                    answer.set_exception(Gone(told["error"]["message"]))
                else:
                    answer.set_exception(AssertionError(told["error"]))
            elif page := self._pages.get(told.get("sessionId", "")):
                page.heard(told["method"], told["params"])

    @asynccontextmanager
    async def page(self) -> AsyncIterator[Page]:
        targets = (await self.call("Target.getTargets"))["targetInfos"]
        (tab,) = [target["targetId"] for target in targets if target["type"] == "page"]
        attached = await self.call("Target.attachToTarget", targetId=tab, flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        await page.leave()
        await page.prepare()
        yield page  # what it emulates ends with the connection


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Browser]:
    async with (
        ClientSession() as http,
        http.ws_connect(address, max_msg_size=2**28, autoping=True) as socket,
    ):
        browser = Browser(socket)
        listening = asyncio.create_task(browser.listen())
        try:
            yield browser
        finally:
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening


def required() -> bool:
    return os.environ.get("REQUIRE_TOOLS") == "1"
