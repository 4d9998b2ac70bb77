"""The site: built without a warning and without a network, and looked at in Chromium."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY
from tests.http_servers import served_folder
from tests.inference.demo_browser import chromium, contrasts

SITE = REPOSITORY / "docs" / "site"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", SITE / "mkdocs.yml"]
    told = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    build = subprocess.run([*command, "--site-dir", folder], env=told, capture_output=True, text=True, timeout=300)
    assert build.returncode == 0, build.stderr
    assert "WARNING" not in build.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with served_folder(site) as address:
        yield address


def test_every_page_of_the_documentation_is_in_the_navigation(site: Path) -> None:
    start = (site / "index.html").read_text()
    pages = [path.stem for path in (REPOSITORY / "docs").glob("*.md") if path.name != "index.md"]
    measured = [f"benchmarks/{path.stem}" for path in (REPOSITORY / "benchmarks").glob("*.md")]

    assert [name for name in pages + measured if f'href="{name}/"' not in start] == []


def test_a_source_that_a_page_links_to_is_a_page_of_the_site(site: Path) -> None:
    guide = (site / "DISTRIBUTED_TRAINING_GUIDE" / "index.html").read_text()
    (link,) = set(re.findall(r'href="([^"]*by_hand/data_parallel\.py/)"', guide))

    assert "broadcast_parameters" in (site / "DISTRIBUTED_TRAINING_GUIDE" / link / "index.html").read_text()


def test_the_front_page_has_three_ways_in_and_the_guide_counts_its_sections(site: Path) -> None:
    start, guide = ((site / name / "index.html").read_text() for name in ("", "DISTRIBUTED_TRAINING_GUIDE"))

    doors = re.findall(r'<a class="md-button[^"]*" href="([^"]+)"', start)
    assert doors == ["recorded_run.html", "TOYS/", "lessons/ring/"]
    total = len(re.findall(r"<h2 [^>]*>\d+\. ", guide))
    shown = re.findall(r'<p class="section">(.*?)</p>', guide)
    assert shown == [f"Section {number} of {total}" for number in range(1, total + 1)]
    assert 'role="dialog" aria-label="Search"' in start


def test_a_run_of_all_cards_is_recorded_and_the_page_of_the_cards_links_to_it(site: Path) -> None:
    link = re.search(r'href="([^"]*recorded_run\.html)"', (site / "CARDS" / "index.html").read_text())
    page = (site / "CARDS" / link[1]).read_text()
    run = json.loads(re.search(r'id="run">(.*?)</script>', page)[1])

    assert [card["state"] for card in run["state"]["cards"].values()] == ["done"] * 12
    assert len(run["pictures"]) == 12
    assert len(page) < 300_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pages_show_their_pictures_and_ask_no_other_server(address: str, scheme: str) -> None:
    problems: list[str] = []
    with chromium() as browser:
        page = browser.new_page(color_scheme=scheme)
        page.on("request", lambda request: request.url.startswith(address) or problems.append(request.url))
        page.on("response", lambda response: response.status < 400 or problems.append(response.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        for path in ("", "DISTRIBUTED_TRAINING_GUIDE/", "TROUBLESHOOTING/", "benchmarks/scaling/", "TOYS/"):
            page.goto(f"{address}/{path}", wait_until="networkidle")
            widths = page.evaluate("[...document.images].map((image) => image.naturalWidth)")
            assert 0 not in widths, path
            palette = page.evaluate("document.body.dataset.mdColorScheme")
            assert palette == {"light": "default", "dark": "slate"}[scheme]
    assert problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_the_toys_work_on_their_page_and_fit_into_it(address: str, scheme: str, width: int) -> None:
    problems: list[str] = []
    with chromium() as browser:
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
        page.on("console", lambda message: problems.append(message.text))
        page.goto(f"{address}/TOYS/", wait_until="networkidle")
        assert page.locator(".toy [role=status]").count() == 4

        page.locator("[data-toy=ring] [name=step]").focus()
        page.keyboard.press("ArrowRight")
        assert page.inner_text("[data-toy=ring] [role=status]").startswith("Step 1 of 3 of the reduce-scatter")
        assert page.evaluate(
            "[...document.querySelectorAll('.toy, .toy-drawing')].every((one) => one.scrollWidth <= one.clientWidth)"
        )
        words = " ".join(page.locator(".toy").all_inner_texts())
        assert [text for ratio, text in contrasts(page) if ratio < 4.5 and text in words] == []
    assert problems == []
