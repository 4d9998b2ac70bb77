"""Takes the pictures of the README's three columns: python docs/site/pictures.py.

They show real programs, so they need what those need, and Chromium: docs/cards.png is what four ranks
held, docs/training.svg a terminal with a run, docs/demo.png two answers of the bundled model. Each is
as wide as a telephone, so it can be read in a third of a page.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from diagrams import DOCS, TERMINAL_INK, terminal
from PIL import Image

sys.path.append(str(DOCS.parent))  # started by path: the imports below need this folder

from tests.inference.demo_browser import chromium, until
from tests.inference.servers import running
from tests.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

PICTURED = re.compile(
    r"$|DistriNews|Done| +(Model  |Data|World|Layout|Device|Global|epoch|\d|Best|Test|Macro|Report|Next)"
)
HEADLINES = (
    "The home side won the cup final after extra time and penalties in the Champions League",
    "Chip maker cuts its profit forecast as rivals release faster processors for phones",
)


def main() -> None:
    (DOCS / "training.svg").write_text(training())
    with chromium() as browser:
        cards(browser)
        with demo_server() as address:
            demo(browser, address)


def training() -> str:
    """A run of two processes in a terminal."""
    with TemporaryDirectory() as folder:
        command = ["training/run_ddp.sh", "2", "--dataset", "sample", "--model", "starter"]
        command += ["--output_dir", f"{folder}/first"]
        # It writes whole lines, as this is no terminal; in one, a bar takes the place of the lines of steps.
        done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=True)
    return drawn(done.stdout.replace(f"{folder}/", "checkpoints/"))


def drawn(printed: str) -> str:
    """The run's layout, epochs and result: what fits into a picture of this size."""
    command = ["$ training/run_ddp.sh 2 --dataset sample --model starter \\", "    --output_dir checkpoints/first"]
    lines = [(line, "#9cdcfe") for line in command]
    for line in printed.splitlines():
        if PICTURED.match(line):
            is_result = line.lstrip().startswith(("Test accuracy", "Done")) or line.endswith("* best")
            lines.append((line.rstrip(), "#7ee787" if is_result else TERMINAL_INK))
    return terminal("A run of two processes: the loss falls from epoch to epoch, then the model is tested", lines)


def cards(browser: Browser) -> None:
    """What four ranks held before and after the all-reduce of their gradients."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "run.html"
        command = [sys.executable, "-m", "learn.cards", "run", "--output", f"{folder}/runs", "--report", str(report)]
        subprocess.run(command, cwd=DOCS.parent, check=True, capture_output=True)
        page = phone(browser, report.as_uri())
        page.click("#cards li:nth-child(8) button")
        page.wait_for_selector("#card .readout")
        page.evaluate("scrollTo(0, 0)")  # places count from the window's corner
        first, last = (page.locator(f"#card {name}").bounding_box() for name in ("h3 >> nth=0", ".readout"))
        clip = {"x": 0, "y": first["y"] - 16, "width": 400, "height": last["y"] - first["y"] + 16}
        picture(page.screenshot(full_page=True, clip=clip)).save(DOCS / "cards.png", optimize=True)


def demo(browser: Browser, address: str) -> None:
    """A headline that the model classifies, and one of which it is not sure."""
    page = phone(browser, address)
    page.evaluate("document.querySelector('.scroller').style.height = '7.5rem'")
    parts = []
    for text, below in zip(HEADLINES, ("#bars", "#remark"), strict=True):
        page.fill("#text", text)
        until(page, "document.querySelector('#mirror:not(.stale) mark') && words.children.length > 0")
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        boxes = [page.locator(name).bounding_box() for name in (".write", ".write .examples", ".answer", below)]
        write, chips, answer, end = boxes
        bands = ((write["y"] - 8, chips["y"]), (answer["y"] - 8, end["y"] + end["height"] + 10))
        for top, bottom in bands:
            clip = {"x": 0, "y": top, "width": 400, "height": bottom - top}
            parts.append(picture(page.screenshot(full_page=True, clip=clip)))
    whole = Image.new("RGB", (parts[0].width, sum(part.height for part in parts)))
    top = 0
    for part in parts:
        whole.paste(part, (0, top))
        top += part.height
    whole.save(DOCS / "demo.png", optimize=True)


def phone(browser: Browser, address: str) -> Page:
    options = {"viewport": {"width": 400, "height": 900}, "device_scale_factor": 2, "color_scheme": "light"}
    page = browser.new_context(reduced_motion="reduce", **options).new_page()
    page.goto(address)
    return page


def picture(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png)).convert("RGB")


@contextmanager
def demo_server() -> Iterator[str]:
    command = [sys.executable, "-m", "inference.serve", "--port", str(port := free_port())]
    with (
        TemporaryDirectory() as folder,
        running(command, port, Path(folder) / "log", MODEL_CHECKPOINT="checkpoints/news"),
    ):
        yield f"http://127.0.0.1:{port}/demo"


if __name__ == "__main__":
    main()
