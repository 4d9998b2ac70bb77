"""A static Space: what is published, and the page in a real Chromium, on a server that only gives out files."""

from __future__ import annotations

import csv
import io
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deployment.image_context import ROOT
from deployment.space_files import static_files
from inference import export
from inference.engines.model_loader import ModelLoader
from inference.engines.native import is_supported
from tests.deployment.card_rules import card_errors, front_matter
from tests.deployment.documented import documented
from tests.deployment.hub_contents import Hub
from tests.deployment.publishing import error_line, run_against, run_page
from tests.deployment.stand_in_hub import running_hub
from tests.http_servers import served_folder
from tests.inference.demo_browser import answer_on, choose, chromium, contrasts, download, until, visits
from training.publishing.hub_upload import write_files

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.skipif(not is_supported()[0], reason="the kernels are not compiled here")

PUBLISH = "deployment/publish_space.py"
NAME = "alice/headlines"
NOWHERE = "http://127.0.0.1:9"
HEADLINES = [
    "Oil prices rise again as stocks fall on Wall Street.",
    "The home side won the cup final after extra time and penalties.",
    "New chip doubles the speed of phones, its makers say.",
]
UNSURE = "Chip maker cuts its profit forecast as rivals release faster processors for phones"
TOLERANCE = 0.05  # the page's word embeddings are int8 too
ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}


@pytest.fixture(scope="module")
def native_folder(model_folder: Path, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(model_folder, tmp_path_factory.mktemp("native") / "tiny"))
    few = ["--rows", str(rows_file), "--limit", "99"]  # too few to calibrate on
    export.main([str(folder), "--engine", "native", *few, "--max_drop", "100"])
    return folder


@pytest.fixture(scope="module")
def page_folder(native_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("static")
    run = run_page(documented("docs/deployment.md", "static-space-dry-run"), NOWHERE, place, native_folder, token=None)
    assert run.returncode == 0, run.stderr
    assert "python -m http.server -d build/page shows it. Nothing was sent." in run.stdout
    return place / "build" / "page"


@pytest.fixture(scope="module")
def address(page_folder: Path) -> Iterator[str]:
    with served_folder(page_folder) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    with visits(browser, address) as open_page:
        yield open_page()


def _answered(page: Page, text: str) -> tuple[str, dict[str, float]]:
    page.fill("#text", "")
    until(page, "label.textContent === 'What will it be?'")
    page.fill("#text", text)
    until(page, "label.textContent !== 'What will it be?'")
    label, _, shares = answer_on(page)
    return label, shares


def test_the_folder_holds_the_page_the_kernels_and_the_model_and_little_code(page_folder: Path) -> None:
    files = [path for path in page_folder.rglob("*") if path.is_file()]
    sizes = {path.relative_to(page_folder).as_posix(): path.stat().st_size for path in files}
    assert {"README.md", "index.html", "service_worker.js", "model/model.json"} < sizes.keys()
    assert sum(name.startswith("model/") for name in sizes) == 2
    # A browser takes one of the four.
    kernels = max(size for name, size in sizes.items() if name.endswith(".wasm"))
    code = sum(size for name, size in sizes.items() if not name.startswith("model/") and not name.endswith(".wasm"))
    assert code + kernels <= 214_000
    card = (page_folder / "README.md").read_text()
    assert card_errors(card, "space") == []
    assert front_matter(card)["sdk"] == "static"
    kept = (page_folder / "service_worker.js").read_text().partition("const FILES = ")[2].partition(";")[0]
    assert all((page_folder / name).is_file() for name in json.loads(kept))


def test_the_page_answers_as_the_engine_does(page: Page, native_folder: Path) -> None:
    model = ModelLoader(native_folder, "native")
    assert "in this browser (WebAssembly relaxed SIMD)" in page.inner_text("#facts")
    assert "your texts and files stay on this device" in page.inner_text("footer")
    assert not page.locator("nav").is_visible()
    for text in HEADLINES:
        expected = model.predict(text)
        label, shares = _answered(page, text)
        assert label == expected["label"]
        assert shares == pytest.approx(expected["probabilities"], abs=TOLERANCE)


def test_the_page_knows_as_well_as_a_server_what_it_does_not_know(browser: Browser, tmp_path: Path) -> None:
    news = ROOT / "checkpoints" / "news"
    write_files(static_files(news), tmp_path / "page")
    with served_folder(tmp_path / "page") as address, visits(browser, address) as open_page:
        page = open_page()
        assert "at most 2% of its answers are wrong" in page.inner_text("#promise-line")
        assert _answered(page, f"{HEADLINES[1]} Champions League")[0] == "Sports"
        label, shares = _answered(page, UNSURE)
        assert label == "Not sure: Business or Sci/Tech"
        assert max(shares.values()) < 0.9
        assert _answered(page, "def f(x): return [y for y in x]")[0] == "Not like the texts this model knows"


def test_the_words_that_decided_are_those_of_the_server(page: Page, native_folder: Path) -> None:
    text = "\U0001f600 goal for the home side \U0001f600 after penalties"
    whole, *without = ModelLoader(native_folder, "native").predict_batch(
        [text, *(" ".join(text.split()[:i] + text.split()[i + 1 :]) for i in range(len(text.split())))]
    )
    weights = [whole["confidence"] - one["probabilities"][whole["label"]] for one in without]
    page.fill("#text", text)
    until(page, "document.querySelectorAll('#words li, #mirror mark').length > 0")
    best = text.split()[max(range(len(weights)), key=lambda i: abs(weights[i]))]
    assert best in page.locator("#mirror mark").all_inner_texts()


def test_a_file_is_classified_without_leaving_the_browser(page: Page, native_folder: Path, tmp_path: Path) -> None:
    model = ModelLoader(native_folder, "native")
    lines = HEADLINES * 20
    choose(page, "news.csv", "\n".join(["headline", *(f'"{line}"' for line in lines), '" "']).encode())
    page.click("#start")
    rows = list(csv.DictReader(io.StringIO(download(page, tmp_path))))
    answers = [(row["headline"], row["label"]) for row in rows]
    assert answers == [*((line, model.predict(line)["label"]) for line in lines), (" ", "")]


def test_a_second_visit_needs_no_server(browser: Browser, page_folder: Path) -> None:
    with visits(browser, "") as open_page:
        with served_folder(page_folder) as address:
            page = open_page(address, refusals=True)
            first = _answered(page, HEADLINES[0])
        page.reload()
        page.wait_for_selector("#bars li", state="attached")
        assert _answered(page, HEADLINES[0]) == first


def test_a_second_visit_needs_no_server_even_if_the_service_worker_came_late(
    browser: Browser, page_folder: Path
) -> None:
    may_come = threading.Event()
    with visits(browser, "") as open_page:

        def hold_up(path: str) -> None:
            if path == "/service_worker.js":
                may_come.wait()

        with served_folder(page_folder, before=hold_up) as address:
            page = open_page(address, refusals=True)
            first = _answered(page, HEADLINES[0])
            may_come.set()
            until(page, "navigator.serviceWorker.controller !== null")
        page.reload()
        page.wait_for_selector("#bars li", state="attached")
        assert _answered(page, HEADLINES[0]) == first


def test_the_page_works_in_a_frame_of_another_site(browser: Browser, address: str, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(f'<link rel="icon" href="data:,"><iframe src="{address}"></iframe>')
    context = browser.new_context()
    with served_folder(tmp_path) as other:
        outer = context.new_page()
        outer.goto(other.replace("127.0.0.1", "localhost"))
        inner = outer.frame_locator("iframe")
        inner.locator("#bars li").first.wait_for(state="attached")
        inner.locator("#text").fill(HEADLINES[0])
        inner.locator("#confidence", has_text="%").wait_for()
    context.close()


def test_threads_are_used_where_the_headers_allow_them(browser: Browser, page_folder: Path) -> None:
    with served_folder(page_folder, ISOLATED) as address, visits(browser, address) as open_page:
        page = open_page()
        assert "threads)" in page.inner_text("#facts")
        isolated = _answered(page, HEADLINES[1])
    with served_folder(page_folder) as address, visits(browser, address) as open_page:
        assert _answered(open_page(), HEADLINES[1]) == isolated


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda folder: _weights(folder).write_bytes(_weights(folder).read_bytes()[:-100]), "did not arrive whole"),
        (lambda folder: _weights(folder).unlink(), "is missing here (status 404)"),
        (
            lambda folder: (folder / "model/model.json").write_text("<html>"),
            "model.json is cut short or is another file",
        ),
        (lambda folder: [file.unlink() for file in folder.rglob("*.wasm")], ".wasm is missing here"),
    ],
)
def test_what_is_missing_or_damaged_is_said_in_one_line(
    browser: Browser, page_folder: Path, tmp_path: Path, damage: Callable[[Path], Any], line: str
) -> None:
    folder = Path(shutil.copytree(page_folder, tmp_path / "page"))
    damage(folder)
    with served_folder(folder) as address, visits(browser, address, ready="#notice:not([hidden])") as open_page:
        page = open_page(refusals=True)
        until(page, f"document.getElementById('notice-text').textContent.includes({json.dumps(line)})")


def _weights(folder: Path) -> Path:
    return next((folder / "model").glob("*.bin"))


def test_the_page_is_readable_on_a_phone_and_in_the_dark(browser: Browser, address: str) -> None:
    for scheme in ("light", "dark"):
        with visits(browser, address) as open_page:
            page = open_page(color_scheme=scheme, viewport={"width": 390, "height": 844})
            _answered(page, HEADLINES[0])
            page.wait_for_timeout(500)  # colours fade in
            assert min(contrasts(page))[0] >= 4.5
            assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_static_space_is_published_in_one_commit_without_a_paid_plan(
    page_folder: Path, native_folder: Path, address: str, tmp_path: Path
) -> None:
    with running_hub(Hub(app=address.rstrip("/"), has_plan=False)) as hub:
        run = run_page(documented("docs/deployment.md", "static-space"), hub.address, tmp_path, native_folder)
        assert run.returncode == 0, run.stderr
        space = hub.repository("spaces", NAME)
        assert len(space.commits) == 1
        assert space.files["index.html"] == (page_folder / "index.html").read_bytes()
        assert f"/spaces/{NAME}" in run.stdout
        again = run_against(hub.address, tmp_path, PUBLISH, NAME, "--model", str(native_folder))
        assert "is a Space that runs static, not docker; choose another name" in error_line(again)


def test_a_model_without_the_native_artefact_is_refused_with_the_command_that_writes_it(
    model_folder: Path, tmp_path: Path
) -> None:
    run = run_against(NOWHERE, tmp_path, PUBLISH, NAME, "--model", str(model_folder), "--static", token=None)
    assert "--engine native" in error_line(run)
