"""The documentation page in a real Chromium, with nothing but the server to load it from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.inference.demo_browser import chromium, contrasts, framed_below_a_path, until, visits
from tests.inference.servers import serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def test_the_documentation_shows_every_operation_and_sends_requests(browser: Browser, model_folder: Path) -> None:
    with (
        serving(model_folder, api_key="key") as client,
        visits(browser, f"{client.base_url}/docs", "#schemas details") as open_page,
    ):
        page = open_page(refusals=True)
        document = client.get("/openapi.json").json()
        operations = [one for methods in document["paths"].values() for one in methods.values()]
        assert page.locator("#operations details").count() == len(operations)
        assert page.locator("#schemas details").count() == len(document["components"]["schemas"])
        predict = page.locator("#predict_predict_post")
        predict.locator("summary").click()
        predict.locator("button").click()
        until(page, "document.querySelector('#predict_predict_post pre').textContent.startsWith('401')")
        page.fill("#key", "key")
        predict.locator("button").click()
        until(page, "document.querySelector('#predict_predict_post pre').textContent.startsWith('200')")
        assert '"label"' in predict.locator("pre").inner_text()
        predict.locator("a", has_text="PredictRequest").click()
        assert page.locator("#schema-PredictRequest table").is_visible()
        for color_scheme in ("light", "dark"):
            page.emulate_media(color_scheme=color_scheme)
            assert not [text for contrast, text in contrasts(page) if contrast < 4.5]


def test_the_documentation_works_below_any_path(browser: Browser, model_folder: Path) -> None:
    with (
        serving(model_folder) as client,
        framed_below_a_path(client) as address,
        visits(browser, f"{address}some/place/docs", "#schemas details") as open_page,
    ):
        page = open_page()
        page.locator("#get_model_model_get summary").click()
        page.locator("#get_model_model_get button").click()
        until(page, "document.querySelector('#get_model_model_get pre').textContent.startsWith('200')")
