"""The toys of the documentation, in Chromium: their numbers are the project's, and what is drawn is these numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from common.errors import UserError
from learn.by_hand.batches import training_batches
from learn.by_hand.cifar10 import Split
from learn.by_hand.ring_all_reduce import ring_steps
from tests.docs.pages import REPOSITORY
from tests.inference.demo_browser import chromium, contrasts
from tests.processes import run_on_ranks
from training.data.batching import DataShard, micro_batches_of_rank
from training.data.tokenized import TokenizedRows
from training.parallelism.timeline import simulate
from training.planning.memory import zero_states

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FILE = (REPOSITORY / "docs" / "toys" / "toys.html").as_uri()
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """The page with all toys, opened from its file; it must load its own two files only, and log no error."""
    requests: list[str] = []
    problems: list[str] = []
    with browser.new_context(viewport={"width": 1400, "height": 900}) as context:
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.goto(FILE)
        yield page
    assert {url for url in requests if not url.startswith("data:")} == {
        FILE,
        *(FILE.replace(".html", end) for end in (".js", ".css")),
    }
    assert problems == []


def choose(page: Page, toy: str, **values: object) -> None:
    """Set fields of a toy, as a person would."""
    for name, value in values.items():
        field = page.locator(f"[data-toy={toy}] [name={name}]")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(str(value))
        else:
            field.fill(str(value))


def said(page: Page, toy: str) -> str:
    return page.inner_text(f"[data-toy={toy}] [role=status]")


# Ring all-reduce.


def _held_after_each_step() -> list[dict[str, Any]]:
    rank = dist.get_rank()
    tensor = torch.arange(1, 10) * 10**rank
    states = [{"phase": "before", "sent": None, "received": None, "held": tensor.tolist(), "bytes": 0}]
    for step in ring_steps(tensor):
        seen = {"phase": step.phase, "sent": step.sent, "received": step.received, "held": tensor.tolist()}
        states.append({**seen, "bytes": states[-1]["bytes"] + step.num_bytes})
    return states


@pytest.mark.parametrize("ranks", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 4, 5))])
def test_the_ring_holds_and_sends_in_each_step_what_real_ranks_do(page: Page, ranks: int) -> None:
    by_rank = run_on_ranks(ranks, _held_after_each_step)

    states = page.evaluate("ranks => toys.ring(ranks)", ranks)

    assert len(states) == len(by_rank[0]) == 1 + 2 * (ranks - 1)
    for state, real in zip(states, zip(*by_rank, strict=True), strict=True):
        assert state["phase"] == real[0]["phase"]
        assert state["held"] == [one["held"] for one in real]
        assert state["bytes"] == [one["bytes"] for one in real]
        if state["phase"] != "before":
            assert state["sent"] == [one["sent"] for one in real]
            assert state["received"] == [one["received"] for one in real]


@pytest.mark.parametrize("ranks", [2, 5])
def test_the_ring_draws_the_numbers_of_each_step_and_marks_what_travels(page: Page, ranks: int) -> None:
    choose(page, "ring", ranks=ranks)
    for step, state in enumerate(page.evaluate("ranks => toys.ring(ranks)", ranks)):
        choose(page, "ring", step=step)

        drawn = page.locator(".toy-ring tbody tr").evaluate_all(
            """rows => rows.map((row) => [...row.querySelectorAll("td")].map((cell) => ({
                values: [...cell.children].map((one) => Number(one.textContent)), classes: [...cell.classList] })))"""
        )

        whole = state["held"][0] if step == 2 * (ranks - 1) else [k * int("1" * ranks) for k in range(1, 10)]
        for rank, cells in enumerate(drawn):
            chunks = [chunk.tolist() for chunk in torch.tensor(state["held"][rank]).tensor_split(ranks)]
            sums = [chunk.tolist() for chunk in torch.tensor(whole).tensor_split(ranks)]
            assert [cell["values"] for cell in cells] == chunks
            for mark in ("sent", "received"):
                marked = [number for number, cell in enumerate(cells) if mark in cell["classes"]]
                assert marked == ([] if step == 0 else [state[mark][rank]])
            assert ["whole" in cell["classes"] for cell in cells] == [
                chunk == total for chunk, total in zip(chunks, sums, strict=True)
            ]
        assert said(page, "ring").endswith(f"Bytes sent by each rank: {', '.join(map(str, state['bytes']))}.")


# Memory under ZeRO.


def test_the_memory_of_each_zero_stage_is_the_planners(page: Page) -> None:
    grid = list(product((66e6, 7.5e9, 70e9), (1, 8, 1024), range(4), ((4, 4, 8), (2, 2, 12), (2, 2, 4))))

    found = page.evaluate("grid => grid.map((inputs) => toys.zero(...inputs))", grid)

    for inputs, bytes_ in zip(grid, found, strict=True):
        assert bytes_ == pytest.approx(zero_states(*inputs), rel=1e-12), inputs


@pytest.mark.parametrize(("model", "ranks", "precision"), [(3, 8, 0), (0, 1, 2), (6, 1024, 1)])
def test_the_bars_of_the_memory_are_as_long_as_the_numbers(page: Page, model: int, ranks: int, precision: int) -> None:
    parameters = (66e6, 335e6, 1.5e9, 7.5e9, 13e9, 70e9, 175e9)[model]
    each = ((4, 4, 8), (2, 2, 12), (2, 2, 4))[precision]
    choose(page, "zero", parameters=model, ranks=ranks.bit_length() - 1, precision=precision)
    whole = sum(zero_states(parameters, ranks, 0, each))
    for stage in range(4):
        choose(page, "zero", stage=stage)
        states = zero_states(parameters, ranks, stage, each)

        bar = f".toy-bar[data-stage='{stage}']"
        widths = page.locator(f"{bar} i").evaluate_all(
            "parts => parts.map((part) => part.getBoundingClientRect().width / part.parentElement.clientWidth)"
        )

        assert widths == pytest.approx([state / whole for state in states], abs=2e-3)
        assert page.locator(".toy-bar.chosen").get_attribute("data-stage") == str(stage)
        shown = [page.inner_text(f"{bar} b"), *page.locator("[data-toy=zero] .toy-key b").all_inner_texts()]
        for text, value in zip(shown, (sum(states), *states), strict=True):
            assert float(text.removesuffix(" GiB").replace(",", "")) == pytest.approx(value / 2**30, rel=0.05)


# Pipeline schedules.


@pytest.mark.parametrize(
    ("most_ranks", "most_micro_batches"), [(4, 6), pytest.param(8, 16, marks=pytest.mark.slow, id="all")]
)
def test_every_pipeline_schedule_runs_the_boxes_of_the_timeline_and_refuses_what_it_refuses(
    page: Page, most_ranks: int, most_micro_batches: int
) -> None:
    grid = list(product(SCHEDULES, range(2, most_ranks + 1), range(1, most_micro_batches + 1)))
    refused = []

    for inputs, found in zip(
        grid, page.evaluate("grid => grid.map((one) => toys.pipeline(...one))", grid), strict=True
    ):
        try:
            real = simulate(*inputs)
        except UserError as error:
            told = str(error).removeprefix("--micro_batches ").replace(": ", " micro-batches: ", 1)
            # The toy's sentence, without the hint at a command line's other choices.
            refused.append(told.startswith(found["refused"].removesuffix(".")))
            continue
        boxes = [
            [(box["stage"], box["kind"], box["microBatch"], box["start"], box["end"]) for box in own]
            for own in found["boxes"]
        ]
        assert boxes == [
            [(box.action.stage, box.action.kind, box.action.micro_batch, box.start, box.end) for box in own]
            for own in real.ranks
        ], inputs
        assert found["duration"] == real.duration
        assert found["bubble"] == pytest.approx(real.bubble_share)
        assert found["kept"] == [real.activations_kept(rank) for rank in range(inputs[1])]
    assert refused
    assert all(refused)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_drawn_pipeline_has_a_box_for_every_pass_at_its_time(page: Page, schedule: str) -> None:
    choose(page, "pipeline", schedule=schedule, ranks=3, microBatches=6)
    real = simulate(schedule, 3, 6)

    for rank, boxes in enumerate(real.ranks):
        drawn = page.locator(f"[data-toy=pipeline] g[data-rank='{rank}'] rect").evaluate_all(
            "rects => rects.map((one) => [+one.getAttribute('x'), +one.getAttribute('width'), one.textContent])"
        )
        (left, width, _), *rects = drawn
        times = [((x - left) / width, wide / width) for x, wide, _ in rects]
        expected = [(box.start / real.duration, (box.end - box.start) / real.duration) for box in boxes]
        assert np.array(times) == pytest.approx(np.array(expected))
        for (_, _, title), box in zip(rects, boxes, strict=True):
            assert title.startswith(f"stage {box.action.stage}, micro-batch {box.action.micro_batch}: ")
        numbers = page.locator(f"[data-toy=pipeline] g[data-rank='{rank}'] text.toy-number").all_text_contents()
        assert numbers == [str(box.action.micro_batch) for box in boxes]
    assert said(page, "pipeline").startswith(f"{real.title}. ")


def test_a_pipeline_with_too_few_micro_batches_says_so_and_draws_nothing(page: Page) -> None:
    choose(page, "pipeline", schedule="1f1b", ranks=4, microBatches=3)

    assert said(page, "pipeline") == "3 micro-batches: the 1f1b schedule over 4 ranks needs at least 4 micro-batches."
    assert page.locator("[data-toy=pipeline] rect").count() == 0


# Who sees which rows.

ROWS = list(product((4, 7, 22, 40), (1, 2, 3, 6), (1, 2, 3), (0, 1, 9)))


def test_the_sampler_deals_the_rows_that_training_by_hand_sees(page: Page) -> None:
    found = page.evaluate("grid => grid.map((one) => toys.rows(...one, 'sampler'))", ROWS)

    for (count, ranks, rows_per_rank, epoch), steps in zip(ROWS, found, strict=True):
        split = Split(np.zeros((count, 32, 32, 3), np.uint8), np.arange(count))
        for rank in range(ranks):
            sampler = DistributedSampler(split, ranks, rank, seed=0)
            sampler.set_epoch(epoch)
            own = [[one["row"] for one in step["ranks"][rank]] for step in steps]
            assert list(chain.from_iterable(own)) == list(sampler)
            trained = [labels.tolist() for _, labels in training_batches(split, sampler, rows_per_rank, seed=0)]
            assert [rows for rows, step in zip(own, steps, strict=True) if not step["dropped"]] == trained
        repeats = sum(one["repeated"] for step in steps for own in step["ranks"] for one in own)
        assert repeats == -count % ranks


def test_the_trainer_divides_each_global_batch_as_the_toy_shows(page: Page) -> None:
    found = page.evaluate("grid => grid.map((one) => toys.rows(...one, 'shares'))", ROWS)

    for (count, ranks, _, _), steps in zip(ROWS, found, strict=True):
        rows = TokenizedRows(np.ones(count, np.int32), np.arange(count + 1), np.zeros(count, int), num_cut=0)
        for step in steps:
            shares = [[one["row"] for one in own] for own in step["ranks"]]
            batch = np.array(list(chain.from_iterable(shares)))
            for rank, share in enumerate(shares):
                (real,) = micro_batches_of_rank(rows, batch, DataShard(rank, ranks))
                assert share == [row for row in real.rows.tolist() if row >= 0]
        everything = [one["row"] for step in steps for own in step["ranks"] for one in own]
        assert sorted(everything) == list(range(count))


@pytest.mark.parametrize("rule", ["sampler", "shares"])
def test_the_table_of_rows_shows_each_row_where_it_is_trained_and_marks_repeats(page: Page, rule: str) -> None:
    choose(page, "rows", rule=rule, count=22, ranks=4, rowsPerRank=3, epoch=2)

    drawn = page.locator(".toy-rows tbody tr").evaluate_all(
        """rows => rows.map((row) => ({ dropped: row.classList.contains("dropped"),
            ranks: [...row.querySelectorAll("td")].map((cell) => [...cell.querySelectorAll("span")].map(
                (one) => ({ row: Number(one.textContent), repeated: one.classList.contains("repeated") }))) }))"""
    )

    assert drawn == page.evaluate("rule => toys.rows(22, 4, 3, 2, rule)", rule)
    trained, missed = {"sampler": (12, 10), "shares": (22, 0)}[rule]
    assert re.search(rf"on {trained} rows .* {missed} of 22 left out", said(page, "rows"))


# The page that shows them.


def test_the_answers_on_the_page_are_what_the_toys_compute(page: Page) -> None:
    text = " ".join((REPOSITORY / "docs" / "TOYS.md").read_text().split())
    four, two, five = ([sum(state["bytes"]) for state in page.evaluate(f"toys.ring({ranks})")] for ranks in (4, 2, 5))
    reduced = page.evaluate("toys.ring(4)[3].held.map((held) => held[0])")
    assert reduced[3] == max(reduced) == 1111
    assert f"here {four[-1]} bytes, so a rank sends {four[-1] // 4} on average" in text
    assert f"There are {len(five) - 1} steps instead of {len(two) - 1}" in text
    assert f"grow from {two[-1] // 2} to {five[-1] / 5:g}" in text

    quarter = page.evaluate("toys.zero(16, 1e9, 2, [4, 4, 8])")
    assert sum(quarter) / 256 == pytest.approx(1 / 4)
    assert sum(page.evaluate("toys.zero(1, 8, 1, [4, 4, 8])")) == 9
    fits = [sum(page.evaluate(f"toys.zero(70e9, {ranks}, 3, [4, 4, 8])")) / 2**30 for ranks in (13, 14, 16)]
    assert fits[0] > 80 > fits[1]
    assert f"From 14 ranks on ({fits[1]:.1f} GiB); on the slider from 16 ranks on ({fits[2]:.0f} GiB)" in text

    assert page.evaluate("toys.pipeline('gpipe', 4, 8).kept") == [8, 8, 8, 8]
    assert page.evaluate("toys.pipeline('1f1b', 4, 8).kept") == [4, 3, 2, 1]
    assert page.evaluate("[12, 13].map((count) => toys.pipeline('1f1b', 4, count).bubble < 0.1999)") == [False, True]

    repeated = page.evaluate("toys.rows(22, 4, 2, 0, 'sampler').map((step) => step.ranks.flat())")
    assert sum(one["repeated"] for step in repeated for one in step) == 2
    steps = [
        [sorted(one["row"] for own in step["ranks"] for one in own) for step in page.evaluate(call)]
        for call in ("toys.rows(24, 2, 4, 0, 'sampler')", "toys.rows(24, 4, 2, 0, 'sampler')")
    ]
    assert steps[0] == steps[1]
    assert page.evaluate("toys.rows(22, 4, 2, 0, 'shares').at(-1).ranks.map((own) => own.length)") == [2, 1, 1, 2]


# For everybody.


def test_every_field_can_be_reached_and_changed_with_the_keyboard_alone(page: Page) -> None:
    page.locator("body").press("Tab")
    while page.evaluate("document.activeElement.tagName") == "A":  # of the introduction
        page.keyboard.press("Tab")
    reached = []
    while (focused := page.evaluate("document.activeElement.closest('.toy')?.dataset.toy")) is not None:
        name = page.evaluate("document.activeElement.name || document.activeElement.textContent")
        drawing = page.locator(f"[data-toy={focused}] .toy-drawing, [data-toy={focused}] [role=status]")
        before = drawing.evaluate_all("parts => parts.map((part) => part.innerHTML)")
        page.keyboard.press("Enter" if page.evaluate("document.activeElement.tagName") == "BUTTON" else "ArrowRight")
        after = drawing.evaluate_all("parts => parts.map((part) => part.innerHTML)")
        assert after != before, (focused, name)
        reached.append((focused, name))
        page.keyboard.press("Tab")

    fields = page.locator(".toy :is(input, select, button)").evaluate_all(
        "all => all.map((one) => [one.closest('.toy').dataset.toy, one.name || one.textContent])"
    )
    assert reached == [tuple(field) for field in fields]
    assert len(reached) == 16


def test_the_step_of_the_ring_moves_with_the_arrow_keys_and_stops_at_the_last_one(page: Page) -> None:
    page.locator("[data-toy=ring] [name=step]").focus()
    for _ in range(9):
        page.keyboard.press("ArrowRight")

    assert page.locator("[data-toy=ring] [name=step]").input_value() == "6"
    assert said(page, "ring").startswith("Step 3 of 3 of the all-gather")
    choose(page, "ring", ranks=2)
    assert said(page, "ring").startswith("Step 1 of 1 of the all-gather")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_is_wider_than_the_window_and_every_text_can_be_read(browser: Browser, scheme: str, width: int) -> None:
    with browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(FILE)
        choose(page, "ring", ranks=5, step=6)
        choose(page, "pipeline", schedule="interleaved", ranks=8, microBatches=16)
        choose(page, "rows", ranks=6, rowsPerRank=4, count=40)

        too_wide = page.evaluate(
            """[...document.querySelectorAll("html, .toy, .toy-drawing, .toy label")].filter(
                (one) => one.scrollWidth > one.clientWidth).map((one) => one.outerHTML)"""
        )
        assert too_wide == []
        low = [(ratio, text) for ratio, text in contrasts(page) if ratio < 4.5]
        assert low == []
