"""The control beside an answer that tells the server which label is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from inference.observing.store import Store
from tests.inference.demo_browser import chromium, contrasts, until, visits
from tests.inference.servers import serving
from tests.processes import REPOSITORY

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NEWS = REPOSITORY / "checkpoints" / "news"
TEXT = "Shares in the carmaker fall after it recalls two million vans"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.mark.parametrize("width", [1400, 390])
def test_a_wrong_answer_is_corrected_by_keyboard(browser: Browser, tmp_path: Path, width: int) -> None:
    path = str(tmp_path / "observed.sqlite")
    with serving(NEWS, observe=path) as server, visits(browser, f"{server.base_url}/demo") as open_page:
        page = open_page(viewport={"width": width, "height": 900})
        page.fill("#text", TEXT)
        page.wait_for_selector("#wrong-open:visible")
        answered = page.inner_text("#label")
        page.focus("#wrong-open")
        page.keyboard.press("Enter")
        until(page, "document.activeElement.id === 'wrong-label'")
        offered = page.locator("#wrong-label option").all_inner_texts()
        assert page.get_attribute("#wrong-open", "aria-expanded") == "true"
        assert len(offered) == 4  # "Choose", and every label but the one that was answered
        assert answered not in offered
        assert page.is_disabled("#wrong-send")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

        page.keyboard.press("Escape")
        until(page, "document.activeElement.id === 'wrong-open'")
        page.keyboard.press("Enter")
        page.select_option("#wrong-label", offered[-1])
        assert min(contrast for contrast, _ in contrasts(page)) >= 4.5
        page.focus("#wrong-send")
        page.keyboard.press("Enter")
        until(page, "document.activeElement.id === 'wrong-line'")
        assert page.inner_text("#wrong-line") == "Thanks. It is recorded."
        assert page.input_value("#text") == TEXT  # Escape in the form does not clear it
        assert "what you correct, it writes down" in page.inner_text("footer")

        page.fill("#text", "Another text")
        until(page, "document.getElementById('wrong-line').textContent === ''")
        page.wait_for_selector("#wrong-open:visible")

    [found] = Store(path).feedback("news")
    assert (found.text, found.label, found.kind) == (TEXT, offered[-1], "correction")
    assert found.request


def test_a_correction_that_fails_says_why_and_can_be_sent_again(browser: Browser, tmp_path: Path) -> None:
    with (
        serving(NEWS, observe=str(tmp_path / "observed.sqlite")) as server,
        visits(browser, f"{server.base_url}/demo") as open_page,
    ):
        page = open_page(refusals=True)
        line = '{"error": {"code": "feedback_failed", "message": "not now"}}'
        page.route("**/feedback", lambda route: route.fulfill(status=503, body=line), times=1)
        page.fill("#text", TEXT)
        page.click("#wrong-open")
        page.select_option("#wrong-label", index=1)
        page.click("#wrong-send")
        until(page, "document.getElementById('wrong-line').textContent === 'not now'")
        page.click("#wrong-send")
        until(page, "document.getElementById('wrong-line').textContent.startsWith('Thanks')")


@pytest.mark.parametrize(("keep_texts", "said"), [("7d", "7 days"), ("36h", "36 hours"), ("60m", "1 hour")])
def test_the_footer_says_how_long_texts_are_kept(browser: Browser, tmp_path: Path, keep_texts: str, said: str) -> None:
    with (
        serving(NEWS, observe=str(tmp_path / "observed.sqlite"), keep_texts=keep_texts) as server,
        visits(browser, f"{server.base_url}/demo") as open_page,
    ):
        page = open_page()
        page.wait_for_selector("#kept-for:visible")
        footer = page.inner_text("footer")
        assert f"what you correct, it writes down. Texts are kept for {said}." in footer
        assert "it writes none of them down" not in footer


def test_a_server_that_takes_no_corrections_is_not_asked_to(browser: Browser) -> None:
    with serving(NEWS) as server, visits(browser, f"{server.base_url}/demo") as open_page:
        page = open_page()
        page.fill("#text", TEXT)
        until(page, "document.getElementById('confidence').textContent !== ''")

        assert not page.is_visible("#wrong")
        assert "it writes none of them down." in page.inner_text("footer")
        assert not page.is_visible("#kept-for")
