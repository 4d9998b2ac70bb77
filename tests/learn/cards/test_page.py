"""The page in a real Chromium, and the report of a run from the disk."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from learn.cards.pipeline import read_pipeline
from learn.cards.report import write_report
from learn.cards.session import Session
from tests.inference.demo_browser import chromium, contrasts, until, visits
from tests.learn.cards.small_runs import TOKEN, served, small_pipeline, with_own_card

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

READY = "#cards .node[aria-current=true]"
CARDS_RUN = [sys.executable, "-m", "learn.cards", "run"]
FIRST_WEIGHTS = 16 * 4
NODES = ("load", "prepare", "shard", "strategy", "group", "forward", "backward", "allreduce", "step")
NODES += ("save", "aggregate", "evaluate")
OpenCards = Callable[..., "tuple[Page, Session]"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def open_cards(browser: Browser, tmp_path: Path) -> Iterator[OpenCards]:
    """Open the page of a small pipeline, or of another."""
    with ExitStack() as stack:

        def open_(options: dict[str, Any] | None = None, **run: Any) -> tuple[Page, Session]:
            session, client = stack.enter_context(served(tmp_path, **run))
            open_page = stack.enter_context(visits(browser, f"{client.base_url}/?token={TOKEN}", READY))
            return open_page(refusals=True, **(options or {})), session

        yield open_


def step(page: Page, node: str, state: str = "done") -> None:
    """Step with the keyboard, and wait until what the card made is shown."""
    until(page, "document.getElementById('step').ariaDisabled === 'false'")
    page.press("#step", "Enter")
    until(page, f"document.querySelector('[data-id={node}]').matches('[data-state={state}][aria-current=true]')")
    if state == "done":
        page.wait_for_selector("#card .preview")


def choose(page: Page, node: str) -> None:
    page.click(f"[data-id={node}]")
    page.wait_for_selector("#card .preview")


def maps(page: Page) -> list[list[str]]:
    """Of every heat map its cells: sign and strength."""
    return page.locator("#card .map").evaluate_all(
        "maps => maps.map(map => [...map.querySelectorAll('.cell')].map("
        "cell => cell.getAttribute('class') + cell.style.getPropertyValue('--strength')))"
    )


def verdicts(page: Page) -> list[str]:
    """Of every moment, whether the ranks hold the same of the chosen tensor."""
    return page.locator("#card .moment .verdict").all_inner_texts()


def test_stepping_with_the_keyboard_shows_what_every_rank_holds(open_cards: OpenCards) -> None:
    page, _ = open_cards()
    seen = {}
    for node in NODES:
        step(page, node)
        seen[node] = maps(page), verdicts(page)
        if node == "shard":
            assert page.locator("#card .strip").first.locator(".rank").count() == 150
            dealt = page.locator("#card .batches .rank").evaluate_all("cells => cells.map(cell => cell.className)")
            assert dealt == ["rank rank-0", "rank rank-1"] * 60
        if node == "forward":
            assert page.locator("#card .of-rank li").count() == 2 * 32

    before, after = seen["allreduce"][0][:2], seen["allreduce"][0][2:]
    assert {len(cells) for cells in before + after} == {FIRST_WEIGHTS}
    assert (before[0] == before[1], after[0] == after[1]) == (False, True)
    assert before == seen["backward"][0]
    assert {node: found[1] for node, found in seen.items() if found[1]} == {
        "group": ["≠ 2 different", "= equal"],
        "backward": ["≠ 2 different"],
        "allreduce": ["≠ 2 different", "= equal"],
        "step": ["= equal", "= equal"],
    }
    assert page.inner_text("#status").startswith("All cards are done.")
    assert page.evaluate("document.activeElement.id") == "step"


def test_a_wrong_value_is_said_beside_its_field(open_cards: OpenCards) -> None:
    page, session = open_cards()
    page.click("[data-id=prepare]")
    page.fill("#field-batch_size", "many")
    page.press("#field-batch_size", "Enter")

    until(page, "document.activeElement.id === 'field-batch_size' && document.activeElement.ariaInvalid === 'true'")
    assert "valid integer" in page.inner_text("#field-batch_size-wrong")
    page.fill("#field-batch_size", "24")
    page.click("#apply")
    until(page, "document.getElementById('field-batch_size').defaultValue === '24'")
    assert (session.number, session.pipeline.node("prepare").config.batch_size) == (2, 24)


def test_a_page_without_its_token_says_to_open_the_printed_address(open_cards: OpenCards) -> None:
    page, session = open_cards()
    page.reload()
    page.wait_for_selector(READY)
    page.goto(page.url.partition("?")[0])  # the cookie is enough
    page.wait_for_selector(READY)
    assert page.evaluate("document.cookie") == ""
    page.context.clear_cookies()
    page.click("#step")
    until(page, "document.getElementById('status').textContent.startsWith('open the address that')")
    page.goto(page.url, wait_until="commit")

    assert page.inner_text("body").startswith("open the address that")
    assert session.runner.next_node.id == "load"


def test_another_number_of_workers_starts_over_with_as_many(open_cards: OpenCards) -> None:
    page, session = open_cards()
    step(page, "load")
    page.select_option("#workers", "5")
    assert (page.inner_text("#reset"), session.number) == ("Reset to 5 workers", 1)
    page.click("#reset")

    until(page, "document.querySelectorAll('[data-id=forward] .rank').length === 5")
    until(page, "document.querySelector('[data-id=load]').dataset.state === 'waiting'")
    assert (page.inner_text("#status"), page.inner_text("#reset")) == ("Next: Load dataset", "Reset")


def test_a_pipeline_without_shards_is_reset_too(open_cards: OpenCards, tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text("nodes: [{id: load, card: dist_load_dataset, config: {source_url: nowhere.csv}}]")
    page, session = open_cards(pipeline=read_pipeline(path))
    step(page, "load", "failed")
    page.click("#reset")

    until(page, "document.getElementById('status').textContent === 'Next: Load dataset'")
    assert session.number == 2
    assert page.locator("#workers").is_hidden()
    assert "rank" not in page.inner_text("#subtitle")


def test_two_clicks_at_once_are_one_step(open_cards: OpenCards) -> None:
    page, _ = open_cards()
    until(page, "document.getElementById('step').ariaDisabled === 'false'")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(f"{request.method} {request.url.rpartition('/')[2]}"))
    page.evaluate("step.click(); step.click()")

    until(page, "document.getElementById('status').textContent === 'Next: Prepare data'")
    assert asked.count("POST step") == 1
    assert page.locator("#status.wrong").count() == 0


def edit(page: Page) -> None:
    until(page, "document.getElementById('edit').ariaDisabled === 'false'")
    page.press("#edit", "Enter")
    until(page, "document.getElementById('wiring-status')?.textContent.includes('no mistakes')")


def wiring_says(page: Page, text: str) -> None:
    until(page, f"document.getElementById('wiring-status').textContent === '{text}'")


def test_a_card_of_ones_own_is_wired_in_with_the_keyboard_and_used(open_cards: OpenCards, tmp_path: Path) -> None:
    pipeline = with_own_card(tmp_path, small_pipeline(tmp_path))
    page, session = open_cards(pipeline=pipeline)
    edit(page)
    page.press("#node-8 summary", "Enter")  # the card is there already: out with it, and in again
    page.press("#node-8-remove", "Enter")
    wiring_says(page, "1 mistake left.")
    assert page.evaluate("document.activeElement.closest('details').id") == "node-8"

    page.press("#add-card", "Enter")
    page.wait_for_selector("#node-12 summary")
    assert page.evaluate("document.activeElement.closest('details').id") == "node-12"
    assert page.input_value("#node-12-inputs-synced_gradients") == "allreduce.synced_gradients"
    page.press("#node-8 summary", "Enter")
    page.select_option("#node-8-inputs-synced_gradients", "halvegradients.synced_gradients")
    wiring_says(page, "13 cards, no mistakes.")
    until(page, "document.querySelectorAll('#cards .in-loop').length === 5")
    page.press("#use-wiring", "Enter")

    until(page, "document.activeElement.id === 'edit' && document.getElementById('step').ariaDisabled === 'false'")
    assert session.number == 2
    assert [node.id for node in session.pipeline.loop][-2:] == ["halvegradients", "step"]


def test_mistakes_of_a_wiring_are_said_where_they_are(open_cards: OpenCards) -> None:
    page, session = open_cards()
    edit(page)
    page.click("#node-1 summary")
    page.fill("#node-1-config-test_ratio", "1.5")
    page.click("#node-5 summary")
    page.select_option("#node-5-inputs-process_group", "")
    wiring_says(page, "2 mistakes left.")

    assert "must be less than 1" in page.inner_text("#node-1-config-test_ratio-wrong")
    assert "is not connected; it needs a process_group" in page.inner_text("#node-5-inputs-process_group-wrong")
    assert page.locator("#editor summary", has_text="needs a change").count() == 2
    page.click("#use-wiring")
    until(page, "document.activeElement.id === 'node-1-config-test_ratio'")
    assert session.number == 1
    page.click("#cancel-wiring")
    until(page, "document.activeElement.id === 'edit'")
    assert page.locator("#card").is_visible()


def test_a_wiring_is_saved_and_loaded_again(open_cards: OpenCards, tmp_path: Path) -> None:
    page, session = open_cards()
    edit(page)
    page.click("#node-2 summary")
    page.fill("#node-2-config-num_workers", "3")
    page.fill("#node-2-id", "deal")
    page.press("#node-2-id", "Tab")
    wiring_says(page, "12 cards, no mistakes.")
    with page.expect_download() as offered:
        page.click("#save-wiring")
    path = tmp_path / offered.value.suggested_filename
    offered.value.save_as(path)

    saved = read_pipeline(path)
    assert (path.name, saved.node("deal").config.num_workers) == ("iris.yaml", 3)
    assert str(saved.node("forward").inputs["sharded_data"]) == "deal.sharded_data"
    page.click("#node-4 summary")
    page.click("#node-4-remove")
    until(page, "document.getElementById('wiring-status').textContent.includes('mistake')")
    page.set_input_files("#wiring-file", path)
    wiring_says(page, "12 cards, no mistakes.")
    page.set_input_files("#wiring-file", {"name": "x.yaml", "mimeType": "", "buffer": b"nodes: [{id: 1}]"})
    until(page, "document.getElementById('wiring-status').textContent.startsWith('not a pipeline: nodes.0.id')")
    page.click("#use-wiring")
    until(page, "document.getElementById('editor').hidden")
    assert session.pipeline.node("deal").config.num_workers == 3


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_the_editor_fits_and_is_legible(open_cards: OpenCards, tmp_path: Path, width: int, scheme: str) -> None:
    options = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    page, _ = open_cards(options, pipeline=with_own_card(tmp_path, small_pipeline(tmp_path)))
    edit(page)
    for number in (1, 8):
        page.click(f"#node-{number} summary")
    page.select_option("#node-8-inputs-synced_gradients", "")
    until(page, "document.getElementById('wiring-status').textContent.includes('mistake')")

    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert [(round(contrast, 2), text) for contrast, text in contrasts(page) if contrast < 4.5] == []


@pytest.mark.slow
def test_what_came_out_is_shown_as_the_card_says(open_cards: OpenCards) -> None:
    page, session = open_cards()
    page.click("#run-all")
    until(page, "document.getElementById('status').textContent.startsWith('All cards are done.')")
    views = {}
    for node in ("load", "strategy", "evaluate"):
        choose(page, node)
        views[node] = {
            part: page.locator(f"#card .preview {part}").all_inner_texts() for part in ("dl.figures dd", "tfoot")
        }

    accuracy = session.runner.outputs["evaluate"][0]["eval_metrics"]["accuracy"]
    assert views["load"] == {"dl.figures dd": [], "tfoot": []}
    assert views["strategy"] == {"dl.figures dd": [], "tfoot": ["total\t\t\t243"]}
    assert (views["evaluate"]["dl.figures dd"][0], views["evaluate"]["tfoot"]) == (f"{accuracy:.2%}", [])


@pytest.mark.slow
def test_what_a_slow_card_made_is_shown_while_the_run_goes_on(open_cards: OpenCards) -> None:
    page, session = open_cards(epochs=10_000)
    page.click("[data-id=group]")
    page.click("#run-all")

    page.wait_for_selector("#card .preview")
    assert session.busy


@pytest.mark.slow
def test_the_curve_follows_the_loss_to_the_end(open_cards: OpenCards) -> None:
    page, session = open_cards(batch_size=16, epochs=30)
    page.click("#run-all")
    page.wait_for_selector("#curve:visible")
    until(page, "document.getElementById('status').textContent.startsWith('All cards are done.')")

    points = page.get_attribute("#curve polyline", "points").split()
    assert len(points) == len(session.history.losses) == 30 * 8
    heights = [float(point.split(",")[1]) for point in points]  # from the top
    assert sum(heights[:8]) < sum(heights[-8:]) / 2
    assert "%" in page.inner_text("[data-id=evaluate] .facts")
    choose(page, "allreduce")
    assert page.locator("#card .choices button").all_inner_texts() == ["epoch 1, batch 1", "epoch 30, batch 8"]
    last = maps(page)
    page.click("#pass-0")
    assert maps(page) != last
    assert page.evaluate("document.activeElement.id") == "pass-0"


@pytest.mark.slow
def test_a_card_that_is_a_pass_ahead_offers_both_and_every_pass_is_named(open_cards: OpenCards) -> None:
    page, _ = open_cards(batch_size=60)
    for node in (*NODES[:9], "forward"):
        step(page, node)
    until(page, "document.querySelectorAll('#card .choices button').length === 2")
    rows = "#card .of-rank li"
    latest = page.locator(rows).all_inner_texts()
    page.press("#pass-0", "Enter")

    assert page.locator("#card [aria-pressed=true]").all_inner_texts() == ["epoch 1, batch 1"]
    assert page.locator(rows).all_inner_texts() != latest
    page.press("#pass-1", "Enter")
    assert page.locator(rows).all_inner_texts() == latest
    choose(page, "backward")
    assert page.locator("#card .content > .hint").all_inner_texts() == ["epoch 1, batch 1"]


@pytest.mark.slow
def test_slices_stand_at_their_places_in_the_whole(open_cards: OpenCards) -> None:
    page, _ = open_cards(strategy="fsdp")
    for node in NODES[:8]:
        step(page, node)

    assert verdicts(page) == ["≠ 2 different", "slices"]
    assert [len(cells) for cells in maps(page)] == [FIRST_WEIGHTS] * 2 + [FIRST_WEIGHTS // 2] * 2
    tops = page.locator("#card .map").evaluate_all(
        "maps => maps.map(map => map.querySelector('.cell').getAttribute('y'))"
    )
    assert tops == ["0", "0", "0", "8"]


@pytest.mark.slow
def test_the_cells_of_a_map_are_read_out_under_the_arrow_keys(open_cards: OpenCards) -> None:
    page, session = open_cards()
    for node in NODES[:7]:
        step(page, node)
    page.locator("#card .map").nth(1).focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp"):
        page.keyboard.press(key)

    gradient = session.runner.storage.tensors("backward/rank_1/after")["gradients/0.weight"]
    assert page.inner_text("#card .readout").startswith("rank 1, after the backward pass: row 1, column 1: ")
    assert float(page.inner_text("#card .readout").rsplit(" ", 1)[1]) == pytest.approx(gradient[1, 1].item(), rel=1e-6)


@pytest.mark.slow
def test_a_rank_that_dies_shows_on_its_card(open_cards: OpenCards) -> None:
    page, _ = open_cards()
    for node in NODES[:5]:
        step(page, node)
    [victim] = [process for process in multiprocessing.active_children() if process.name == "rank 1"]
    os.kill(victim.pid, signal.SIGKILL)
    step(page, "forward", "failed")

    assert page.inner_text("#card .failure").startswith("rank 1, card dist_forward (node forward): the process ended")
    assert page.get_attribute("#step", "aria-disabled") == "true"
    page.click("#reset")
    until(page, "document.getElementById('step').ariaDisabled === 'false'")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1400])
def test_every_card_fits_and_is_legible(open_cards: OpenCards, width: int, scheme: str) -> None:
    page, _ = open_cards({"viewport": {"width": width, "height": 900}, "color_scheme": scheme}, workers=8)
    for node in NODES:
        step(page, node)
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        faint = [(round(contrast, 2), text) for contrast, text in contrasts(page) if contrast < 4.5]
        assert (node, overflow, faint) == (node, 0, [])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_shards_of_sixteen_ranks_are_legible_and_named(open_cards: OpenCards, scheme: str) -> None:
    page, session = open_cards({"color_scheme": scheme}, workers=16)
    for node in NODES[:3]:
        step(page, node)
    [picture] = session.picture("shard")
    [rows], [owners] = picture["shards"]["batches"], picture["shards"]["owners"]
    shares = [[row for row, owner in zip(rows, owners, strict=True) if owner == rank] for rank in range(16)]

    assert [(round(contrast, 2), text) for contrast, text in contrasts(page) if contrast < 4.5] == []
    strip, batch = (page.get_attribute(f"#card {place}", "aria-label") for place in ("[role=img].strip", ".batches li"))
    counts = ", ".join(f"rank {rank} has {len(share)}" for rank, share in enumerate(shares))
    assert strip == f"120 rows to train on, of which {counts}; 30 rows to test on"
    assert batch.split(": ")[1].split("; ")[15] == f"rank 15 takes rows {', '.join(map(str, shares[15]))}"


@pytest.mark.slow
def test_a_report_from_the_disk_shows_what_the_server_showed(
    open_cards: OpenCards, browser: Browser, tmp_path: Path
) -> None:
    page, session = open_cards(batch_size=30, epochs=2)
    page.click("#run-all")
    until(page, "document.getElementById('status').textContent.startsWith('All cards are done.')")
    report = tmp_path / "reports" / "run.html"
    write_report(report, session.runner, session.history)

    with visits(browser, report.as_uri(), READY) as open_page:
        copy = open_page()
        assert copy.locator("#controls").is_hidden()
        for node in NODES:
            choose(page, node)
            choose(copy, node)
            assert maps(copy) == maps(page)
            assert copy.inner_text("#card .content") == page.inner_text("#card .content")
            assert "server" not in copy.inner_text("#card")
        facts = "cards => cards.map(card => card.innerText)"
        assert copy.locator("#cards .node").evaluate_all(facts) == page.locator("#cards .node").evaluate_all(facts)
        assert copy.get_attribute("#curve polyline", "points") == page.get_attribute("#curve polyline", "points")


@pytest.mark.slow
def test_run_writes_the_page_of_its_run(start: Callable[..., Any], browser: Browser, tmp_path: Path) -> None:
    report = tmp_path / "run.html"
    run = start([*CARDS_RUN, "--workers", "2", "--epochs", "3", "--report", report, "--output", tmp_path / "runs"])

    assert (run.process.returncode, run.err) == (0, "")
    assert f"The run on a page: {report}" in run.out
    with visits(browser, report.as_uri(), READY) as open_page:
        assert open_page().locator(".node[data-state=done]").count() == len(NODES)
