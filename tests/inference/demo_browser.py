"""Drives the demo page in a real Chromium, and puts it behind a proxy."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.http_servers import JsonHandler, served_answers

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OpenPage = Callable[..., "Page"]
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
WAIT_SECONDS = 20
FRAMING_PAGE = b"""<!doctype html><link rel="icon" href="data:,"><ul id="bars"><li></li></ul>
<iframe src="/some/place/"></iframe>"""
_CONTRASTS = """() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const ground = (node) => getComputedStyle(node).backgroundColor;
    const backgrounds = (node) => (node ? [...backgrounds(node.parentElement), ground(node)] : []);
    const luminance = (layers) => {
        for (const layer of layers) { canvas.fillStyle = layer; canvas.fillRect(0, 0, 1, 1); }
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((c) => c / 255)
            .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const found = [];
    for (let node; (node = walker.nextNode()); ) {
        const parent = node.parentElement;
        if (!node.textContent.trim() || !parent.checkVisibility() || parent.closest("#mirror")) continue;
        const under = backgrounds(parent);
        const pair = [luminance(under), luminance([...under, getComputedStyle(parent).color])];
        found.push([Math.max(...pair) / Math.min(...pair), node.textContent.trim()]);
    }
    for (const mark of document.querySelectorAll("#mirror mark")) {
        const under = backgrounds(mark);
        const pair = [luminance(under), luminance([...under, getComputedStyle(text).color])];
        found.push([Math.max(...pair) / Math.min(...pair), mark.textContent]);
    }
    return found;
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the Chromium that is installed; skips where there is none."""
    playwright_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    program = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if program is None:
        pytest.skip(f"no Chromium here (looked for {', '.join(CHROMIUMS)})")
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def visits(browser: Browser, home: str, ready: str = "#bars li") -> Iterator[OpenPage]:
    """Open pages with empty profiles; at the end they must have asked no other server, and logged no error.

    Args:
        browser: to open them in.
        home: the address of a page that none is given for.
        ready: the selector of what a page has once it can be used.
    """
    contexts, problems = [], []

    def open_(address: str = home, *, refusals: bool = False, **options: Any) -> Page:
        context = browser.new_context(**options)
        context.set_default_timeout(WAIT_SECONDS * 1000)
        contexts.append(context)
        page = context.new_page()
        origin = "/".join(address.split("/")[:3])

        def check_console(kind: str, text: str) -> None:
            # Chromium logs each refused request as an error; some tests have requests refused.
            if kind in ("error", "warning") and not (refusals and text.startswith("Failed to load resource")):
                problems.append(text)

        page.on("console", lambda message: check_console(message.type, f"{message.text} {message.location}"))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request", lambda request: request.url.startswith((f"{origin}/", "blob:")) or problems.append(request.url)
        )
        page.goto(address)
        page.wait_for_selector(ready, state="attached")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert problems == []


def until(page: Page, expression: str) -> None:
    """Wait until JavaScript holds; Playwright's own wait evaluates where the page's policy forbids it."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"never came true: {expression}"
        page.wait_for_timeout(20)


def answer_on(page: Page) -> tuple[str, str, dict[str, float]]:
    """The label, the confidence as written, and the length of each label's bar."""
    bars = page.locator("#bars li").evaluate_all(
        "bars => bars.map(bar => [bar.dataset.label, Number(bar.style.getPropertyValue('--share'))])"
    )
    return page.inner_text("#label"), page.inner_text("#confidence"), dict(bars)


def expect_answer(page: Page, expected: dict[str, Any]) -> None:
    """Wait until the page shows this answer of the server."""
    shares = json.dumps([f"{share:.4f}" for share in expected["probabilities"].values()])
    # The label too: with another promise the same shares may already be there, under another headline.
    shown = f"{shares}.every((share, i) => bars.children[i]?.style.getPropertyValue('--share') === share)"
    until(page, f"{shown} && label.textContent === {json.dumps(expected['label'])}")
    label, confidence, bars = answer_on(page)
    assert label == expected["label"]
    assert confidence == f"{expected['confidence']:.1%}"
    assert list(bars) == list(expected["probabilities"])


def choose(page: Page, name: str, content: bytes) -> None:
    """Hand the page a file."""
    page.set_input_files("#file-input", {"name": name, "mimeType": "", "buffer": content})
    page.wait_for_selector("#plan:visible, #drop-error:visible")


def download(page: Page, tmp_path: Path) -> str:
    """Wait for the end of a run, and save what the page offers."""
    page.wait_for_selector("#download:visible")
    with page.expect_download() as offered:
        page.click("#download")
    path = tmp_path / offered.value.suggested_filename
    offered.value.save_as(path)
    return path.read_bytes().decode()


def contrasts(page: Page) -> list[tuple[float, str]]:
    """Each visible text with its contrast against what lies under it, marked words included."""
    return page.evaluate(_CONTRASTS)


@contextmanager
def framed_below_a_path(server: httpx.Client) -> Iterator[str]:
    """Run a proxy that serves `server` below a path; yields the address of a page that shows the demo in a frame."""
    with served_answers(_Proxy(server).answer) as address:
        yield f"{address}/"


class _Proxy:
    """Hands /some/place/* to the server's /*; / is a page that frames it."""

    def __init__(self, behind: httpx.Client) -> None:
        self.behind = behind

    def answer(self, request: JsonHandler) -> None:
        if request.path == "/":
            return request.send(200, FRAMING_PAGE, {"Content-Type": "text/html"})
        headers = {name: request.headers[name] for name in ("Accept", "Content-Type") if name in request.headers}
        path, body = request.path.removeprefix("/some/place"), request.body()
        headers["Accept-Encoding"] = "identity"
        answer = self.behind.request(request.command, path, content=body, headers=headers)
        hop = ("content-length", "transfer-encoding", "connection")
        kept = {name: value for name, value in answer.headers.items() if name not in hop}
        return request.send(answer.status_code, answer.content, kept)
