"""The demo page in a real Chromium, before a real server."""

from __future__ import annotations

import ast
import csv
import io
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.inference.demo_browser import (
    OpenPage,
    answer_on,
    choose,
    chromium,
    contrasts,
    download,
    expect_answer,
    framed_below_a_path,
    until,
    visits,
)
from tests.inference.test_pairs import make_pair_folder
from tests.processes import REPOSITORY

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

StartServer = Callable[..., AbstractContextManager[httpx.Client]]
HEADLINE = "Oil prices rise again as stocks fall on Wall Street."
OTHER = "The home side won the cup final after extra time and penalties."
API_KEY = "open sesame"
# For the model of the repository, which is calibrated.
SURE = "The home side won the cup final after extra time and penalties in the Champions League"
UNSURE = "Chip maker cuts its profit forecast as rivals release faster processors for phones"
FOREIGN = "def f(x): return [y for y in x if y > 3]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Browser, server: httpx.Client) -> Iterator[OpenPage]:
    with visits(browser, f"{server.base_url}/demo") as open_page:
        yield open_page


@pytest.fixture(scope="module")
def calibrated(start_server: StartServer) -> Iterator[httpx.Client]:
    with start_server(REPOSITORY / "checkpoints" / "news") as client:
        yield client


@pytest.fixture
def open_calibrated(browser: Browser, calibrated: httpx.Client) -> Iterator[OpenPage]:
    with visits(browser, f"{calibrated.base_url}/demo") as open_page:
        yield open_page


def _predict(server: httpx.Client, text: str, **asked: Any) -> dict[str, Any]:
    return server.post("/predict", json={"text": text, **asked}).raise_for_status().json()


def test_a_calibrated_model_answers_only_where_it_is_sure_enough(
    open_calibrated: OpenPage, calibrated: httpx.Client
) -> None:
    page = open_calibrated()
    assert page.input_value("#max-error") == "0.02"
    known = calibrated.get("/model").json()["calibration"]
    answered = known["operating_points"]["0.02"]["answered"]
    promise = page.inner_text("#promise-line")
    assert "at most 2% of its answers are wrong" in promise
    assert f"{known['rows']:,} rows" in promise
    assert f"It answers {100 * answered:.3g}% of them" in promise
    place = page.locator("#file").bounding_box()

    page.fill("#text", SURE)
    expect_answer(page, _predict(calibrated, SURE))
    page.fill("#text", UNSURE)
    expected = _predict(calibrated, UNSURE, coverage=0.95)
    until(page, f"label.textContent === 'Not sure: {' or '.join(expected['set'])}'")
    assert len(expected["set"]) == 2
    assert page.inner_text("#confidence") == ""
    assert page.inner_text("#remark").startswith(f"{expected['confidence']:.1%} sure; it answers from ")
    assert answer_on(page)[2] == pytest.approx(expected["probabilities"], abs=1e-4)
    winners = page.locator("#bars .winner").evaluate_all("bars => bars.map((bar) => bar.dataset.label)")
    assert sorted(winners) == sorted(expected["set"])
    until(page, "announce.textContent.startsWith('Not sure: ')")  # for those who hear the page
    assert f"of probability of {expected['label']} lost" in page.inner_text("#why")
    page.fill("#text", FOREIGN)
    until(page, "label.textContent === 'Not like the texts this model knows'")
    familiarity = _predict(calibrated, FOREIGN, familiarity=True)["familiarity"]
    assert page.inner_text("#remark") == f"Less familiar than {100 - 100 * familiarity:g}% of ordinary texts."
    assert min(answer_on(page)[2].values()) > 0
    assert page.locator("#bars .winner").count() == 0
    assert page.locator("#file").bounding_box() == place

    page.select_option("#max-error", label="Always")
    expect_answer(page, _predict(calibrated, FOREIGN))
    assert page.inner_text("#remark").startswith("Mostly unknown to this model: less familiar than ")
    assert page.inner_text("#promise-line") == "It names the likeliest label, however unsure it is."


def test_a_strictest_promise_is_offered_where_the_usual_one_is_not_held(
    open_calibrated: OpenPage, calibrated: httpx.Client
) -> None:
    page = open_calibrated()
    model = calibrated.get("/model").json()
    points = model["calibration"]["operating_points"]
    for name in ("0.005", "0.01", "0.015", "0.02"):
        points[name]["threshold"] = None
    page.route("**/model", lambda route: route.fulfill(json=model))
    page.reload()
    page.wait_for_selector("#promise:visible")
    options = page.locator("#max-error option").all_inner_texts()
    assert options == ["Always", "Only if at most 3% are wrong", "Only if at most 5% are wrong"]
    assert page.input_value("#max-error") == "0.03"


def test_the_page_says_so_if_the_server_is_set_to_answer_only_when_it_is_sure(
    browser: Browser, start_server: StartServer
) -> None:
    with (
        start_server(REPOSITORY / "checkpoints" / "news", MAX_ERROR="2%") as server,
        visits(browser, f"{server.base_url}/demo") as open_page,
    ):
        page = open_page()
        page.select_option("#max-error", label="Always")
        page.fill("#text", UNSURE)
        until(page, "label.textContent === 'Not sure'")
        assert page.inner_text("#remark") == "This server is set to answer only when the model is surer."


def test_a_file_comes_back_with_what_the_model_was_not_sure_of(
    open_calibrated: OpenPage, calibrated: httpx.Client, tmp_path: Path
) -> None:
    page = open_calibrated()
    assert page.inner_text("#file-hint").endswith("four more columns: label, confidence, abstained, and set.")
    choose(page, "news.csv", "\n".join(["headline", SURE, UNSURE, f'"{FOREIGN}"']).encode())
    page.click("#start")
    rows = list(csv.DictReader(io.StringIO(download(page, tmp_path))))
    asked = {"coverage": 0.95, "max_error": 0.02, "familiarity": True}
    for row in rows:
        expected = _predict(calibrated, row["headline"], **asked)
        assert row["label"] == (expected["label"] or "")
        assert row["abstained"] == (expected["abstained"] or "")
        assert row["set"] == "|".join(expected["set"])
    assert [row["abstained"] for row in rows] == ["", "uncertain", "unfamiliar"]
    assert page.locator("#legend li").all_inner_texts() == ["Sports 1", "not sure 1", "unfamiliar 1"]
    assert page.locator("#preview .tag").all_inner_texts() == ["unfamiliar", "not sure", "Sports"]

    page.click("#again")
    page.select_option("#max-error", label="Always")
    assert page.inner_text("#file-hint").endswith("two more columns: label and confidence.")
    choose(page, "news.csv", f"headline\n{UNSURE}\n".encode())
    page.click("#start")
    (row,) = csv.DictReader(io.StringIO(download(page, tmp_path)))
    assert list(row) == ["headline", "label", "confidence"]
    assert row["label"] == _predict(calibrated, UNSURE)["label"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_the_model_does_not_know_can_be_read_on_a_phone(open_calibrated: OpenPage, scheme: str) -> None:
    page = open_calibrated(color_scheme=scheme, reduced_motion="reduce", viewport={"width": 360, "height": 740})
    for text in (UNSURE, FOREIGN):
        page.fill("#text", text)
        until(page, "announce.textContent.startsWith('Not ')")
        assert min(contrasts(page))[0] >= 4.5, min(contrasts(page))
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        page.fill("#text", "")
        until(page, "!announce.textContent")


def test_several_labels_are_shown_with_their_thresholds(
    browser: Browser, start_server: StartServer, multi_label_folder: Path
) -> None:
    with start_server(multi_label_folder) as server, visits(browser, f"{server.base_url}/demo") as open_page:
        page = open_page()
        page.fill("#text", HEADLINE)
        expected = _predict(server, HEADLINE)
        given = ", ".join(expected["labels"]) or "No label"
        until(page, f"label.textContent === {given!r}")
        winners = page.locator("#bars .winner").evaluate_all("bars => bars.map((bar) => bar.dataset.label)")
        assert sorted(winners) == sorted(expected["labels"])
        marks = page.locator("#bars .threshold").evaluate_all("marks => marks.map((mark) => mark.title)")
        assert marks == [
            "given if at least 50.0%",
            "given if at least 30.0%",
            "given if at least 60.0%",
            "given if at least 45.0%",
        ]
        assert page.inner_text("#file-hint").endswith("You get it back with one more column: labels.")


def test_a_number_is_shown_without_bars(browser: Browser, start_server: StartServer, regression_folder: Path) -> None:
    address = "#facts:not(:empty)"
    with (
        start_server(regression_folder) as server,
        visits(browser, f"{server.base_url}/demo", ready=address) as open_page,
    ):
        page = open_page()
        page.fill("#text", HEADLINE)
        value = _predict(server, HEADLINE)["value"]
        until(page, f"label.textContent === Number({value}).toLocaleString('en', {{ maximumSignificantDigits: 6 }})")
        assert page.locator("#bars").is_hidden()
        assert page.inner_text("#remark").startswith("price. ")
        page.wait_for_selector("#words li")
        assert page.inner_text("#why") == "In price lost without the word."


def test_a_model_of_pairs_gets_a_second_field_and_a_second_column(
    browser: Browser, start_server: StartServer, model_folder: Path, tmp_path: Path
) -> None:
    folder = make_pair_folder(model_folder, tmp_path / "pairs", "bert")
    address = "body[data-pairs]"
    with start_server(folder) as server, visits(browser, f"{server.base_url}/demo", ready=address) as open_page:
        page = open_page()
        assert page.locator("#examples").is_hidden()
        page.fill("#text", HEADLINE)
        until(page, "remark.textContent === 'Both texts are read together.'")
        page.fill("#text-pair", OTHER)
        pair = {"text": HEADLINE, "text_pair": OTHER}
        expect_answer(page, server.post("/predict", json=pair).json())
        until(page, "document.querySelectorAll('#mirror mark, #pair-mirror mark').length > 0")
        explained = server.post("/explain", json=pair).json()
        strongest = max(explained["words"] + explained["pair_words"], key=lambda word: abs(word["weight"]))["word"]
        assert page.locator("#words li").first.inner_text().split("\n")[0].strip(".,") in strongest
        page.press("#text-pair", "Escape")
        assert [page.input_value(field) for field in ("#text", "#text-pair")] == ["", ""]

        choose(page, "pairs.csv", f'question,answer\n"{HEADLINE}","{OTHER}"\n"{OTHER}",\n'.encode())
        assert page.inner_text("#sample li:first-child") == f"{HEADLINE} | {OTHER}"
        page.click("#start")
        content = download(page, tmp_path)
        rows = list(csv.DictReader(io.StringIO(content)))
        assert [row["label"] for row in rows] == [server.post("/predict", json=pair).json()["label"], ""]
        assert rows[1]["error"] == "blank: nothing to classify"
        page.click("#again")
        choose(page, "lines.txt", b"one line\nanother\n")
        assert "has one column" in page.inner_text("#drop-error")


def test_the_answer_follows_the_typing_and_nothing_jumps(open_page: OpenPage, server: httpx.Client) -> None:
    page = open_page()
    assert page.is_hidden("#promise")  # a model without calibration has nothing to promise
    place = page.locator("#file").bounding_box()
    assert set(answer_on(page)[2].values()) == {0}
    page.type("#text", HEADLINE[:16], delay=5)
    expect_answer(page, _predict(server, HEADLINE[:16]))
    page.type("#text", HEADLINE[16:], delay=5)
    expect_answer(page, _predict(server, HEADLINE))
    assert page.locator("#timing dt").first.inner_text() == "round trip"
    assert "forward" in page.locator("#timing dt").all_inner_texts()
    until(page, "/without|No single/.test(why.textContent)")
    assert page.locator("#file").bounding_box() == place
    page.fill("#text", "many words " * 30)
    until(page, "remark.textContent.includes('first 24 tokens')")
    assert not page.locator("#mirror mark").count()  # those of the text before are gone
    page.fill("#text", "")
    until(page, "!document.body.dataset.accent && !words.children.length && !mirror.querySelector('mark')")


def test_what_the_model_has_not_read_is_grey_once_the_words_are_explained(open_page: OpenPage) -> None:
    page = open_page()
    text = f"{HEADLINE} {' '.join(f'word{number}' for number in range(90))}"
    page.fill("#text", text)
    page.click("#explain")
    page.wait_for_selector("#mirror mark.unread")
    unread = page.locator("#mirror mark.unread").text_content()
    assert text.endswith(unread)
    assert 60 <= len(unread.split()) <= 90  # the model reads 24 tokens


def test_texts_that_stood_for_a_while_are_kept_to_come_back_to(open_page: OpenPage, server: httpx.Client) -> None:
    page = open_page()
    for text in (HEADLINE, OTHER):
        page.fill("#text", text)
        until(page, f"[...earlier.children].some(one => one.textContent === {json.dumps(text)})")
    page.type("#text", " more")  # replaces its own beginning
    until(page, f"earlier.firstChild.textContent === {json.dumps(f'{OTHER} more')}")
    assert page.locator("#earlier button").all_inner_texts() == [f"{OTHER} more", HEADLINE]
    page.locator("#earlier button").last.click()
    expect_answer(page, _predict(server, HEADLINE))
    assert page.locator("#earlier [aria-pressed=true]").all_inner_texts() == [HEADLINE]


def test_words_that_cannot_be_explained_are_not_those_of_the_text_before(
    open_page: OpenPage, server: httpx.Client
) -> None:
    page = open_page(refusals=True)
    page.fill("#text", HEADLINE)
    page.wait_for_selector("#mirror mark")
    error = {"error": {"code": "queue_full_for_good", "message": "no room for that many"}}
    page.route("**/explain", lambda route: route.fulfill(status=422, json=error))
    page.fill("#text", f"{HEADLINE} {OTHER}")
    until(page, "why.textContent.includes('no room')")
    expect_answer(page, _predict(server, f"{HEADLINE} {OTHER}"))
    assert not page.locator("#mirror mark, #words li").count()


def test_a_stale_answer_never_wins(open_page: OpenPage, server: httpx.Client) -> None:
    page = open_page()
    held: list[Route] = []

    def hold_first(route: Route) -> None:
        if HEADLINE in route.request.post_data_json["text"]:
            held.append(route)
        else:
            route.continue_()

    page.route("**/predict", hold_first)
    with page.expect_request("**/predict"):
        page.fill("#text", HEADLINE)
    page.fill("#text", OTHER)
    expect_answer(page, _predict(server, OTHER))
    held[0].continue_()
    with page.expect_response("**/explain"):  # after a pause in which the older answer would have come
        pass
    expect_answer(page, _predict(server, OTHER))


def test_words_that_decided_are_coloured_where_they_stand(open_page: OpenPage, server: httpx.Client) -> None:
    page = open_page()
    text = f"🚀🚀 “{HEADLINE}”"  # offsets after an emoji differ between Python and JavaScript
    page.fill("#text", text)
    page.wait_for_selector("#mirror mark")
    words = {word["word"].strip("“”.") for word in server.post("/explain", json={"text": text}).json()["words"]}
    marked = page.locator("#mirror mark").all_inner_texts()
    assert marked
    assert set(marked) <= words
    assert set(page.locator("#words bdi").all_inner_texts()) <= words
    sizes = page.evaluate("[text, mirror].map(one => [one.scrollHeight, one.clientWidth, getComputedStyle(one).font])")
    assert sizes[0] == sizes[1]
    page.type("#text", " More")  # what stays keeps its colour until the next answer
    assert page.locator("#mirror.stale mark").all_inner_texts() == marked


def test_the_first_example_of_the_model_is_answered_on_load_and_replaced_by_what_is_typed(
    open_calibrated: OpenPage, calibrated: httpx.Client
) -> None:
    page = open_calibrated()
    examples = calibrated.get("/model").json()["metrics"]["examples"]
    names, texts = list(examples), list(examples.values())
    assert page.locator("#examples button").all_inner_texts() == names
    expect_answer(page, _predict(calibrated, texts[0]))
    page.click("#text")
    page.keyboard.type(SURE)
    expect_answer(page, _predict(calibrated, SURE))
    page.focus("#examples li:nth-child(3) button")
    page.keyboard.press("Enter")
    expect_answer(page, _predict(calibrated, texts[2]))
    assert page.locator("#examples [aria-pressed=true]").all_inner_texts() == [names[2]]


def test_the_page_shows_how_to_ask_the_same_and_a_link_that_holds_the_text(
    open_page: OpenPage, server: httpx.Client
) -> None:
    page = open_page()
    text = """It's "oil" again: 5% & \\more"""
    page.fill("#text", text)
    expected = _predict(server, text)
    expect_answer(page, expected)
    page.click("#use summary")
    until(page, "document.getElementById('use-curl').textContent.includes('oil')")
    answer = subprocess.run(["bash", "-c", page.inner_text("#use-curl")], capture_output=True, check=True)
    assert json.loads(answer.stdout)["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-3)
    asked = page.inner_text("#use-python").splitlines()[2].removeprefix("asked = ")
    assert ast.literal_eval(asked) == {"text": text}
    linked = open_page(f"{server.base_url}/demo{page.get_attribute('#use-link', 'href')}")
    expect_answer(linked, expected)
    assert linked.input_value("#text") == text


def test_a_refusal_stands_beside_the_text_and_the_older_answer_is_paler(open_page: OpenPage) -> None:
    page = open_page(refusals=True)
    page.fill("#text", HEADLINE)
    until(page, "confidence.textContent.endsWith('%')")
    page.fill("#text", "x" * 2001)
    until(page, "remark.textContent.includes('> maximum 2000')")
    assert page.is_hidden("#notice")
    until(page, "getComputedStyle(bars).opacity === '0.5' && getComputedStyle(remark).opacity === '1'")
    page.fill("#text", HEADLINE)
    until(page, "getComputedStyle(bars).opacity === '1' && !remark.classList.contains('error')")


def test_long_addresses_and_scripts_from_right_to_left_stay_in_their_field(open_page: OpenPage) -> None:
    page = open_page()
    page.fill("#text", "مرحبا https://example.com/" + "never-ends" * 20)
    assert page.evaluate("[text, mirror].map((one) => getComputedStyle(one).direction)") == ["rtl", "rtl"]
    widths = "(({ scrollWidth, clientWidth }) => [scrollWidth, clientWidth])(text.closest('.scroller'))"
    assert len(set(page.evaluate(widths))) == 1


def test_a_picture_is_not_taken_for_a_text_file(open_page: OpenPage) -> None:
    page = open_page()
    choose(page, "pic.png", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR")
    assert page.inner_text("#drop-error") == "pic.png is not a text file."
    choose(page, "wide.txt", "Goal!\nShares fall\n".encode("utf-16"))
    assert page.locator("#sample li").all_inner_texts() == ["Goal!", "Shares fall"]


def test_a_long_text_is_explained_on_demand_only(open_page: OpenPage) -> None:
    page = open_page()
    page.fill("#text", "word " * 100)
    page.click("#explain")
    until(page, "/without|No single/.test(why.textContent)")


def test_a_csv_file_comes_back_with_its_own_cells_untouched(
    open_page: OpenPage, server: httpx.Client, tmp_path: Path
) -> None:
    rows = [
        '1,"Oil, ""black gold"",\nrises",x',
        "2,,y",
        "3,Tor für München 🎉,=1+1",
        f"4,{'long ' * 500},z",
        '5,"Goal!"',
    ]
    page = open_page(refusals=True)
    choose(page, "news.csv", "\r\n".join(["id,Text,label", *rows, "", ""]).encode())
    assert page.inner_text("#column option:checked") == "Text"
    page.click("#start")
    content = download(page, tmp_path)
    header, *records = list(csv.reader(io.StringIO(content)))
    assert (tmp_path / "news.labelled.csv").exists()
    assert header == ["id", "Text", "label", "predicted_label", "predicted_confidence", "predicted_error"]
    assert [record[:3] for record in records[:4]] == list(csv.reader(io.StringIO("\r\n".join(rows[:4]))))
    assert records[4][:3] == ["5", "Goal!", ""]  # a short row gets its missing cells, so that columns stay aligned
    assert all(row in content for row in rows)
    for record in (records[0], records[2], records[4]):
        expected = _predict(server, record[1])
        assert record[3] == expected["label"]
        assert float(record[4]) == pytest.approx(expected["confidence"], abs=1e-3)
    assert records[1][3:] == ["", "", "blank: nothing to classify"]
    assert records[3][3:5] == ["", ""]
    assert "> maximum 2000" in records[3][5]
    assert page.inner_text("#refused-title") == "2 rows without an answer"


def test_a_text_file_comes_back_as_csv(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(refusals=True)  # the server takes eight texts at once, the page tries more first
    choose(page, "lines.txt", ("\ufeff" + 'Goal, "at last"!\n' + "Shares fall\n" * 30).encode())
    page.click("#start")
    content = download(page, tmp_path)
    assert content.startswith("\ufefftext,label,confidence\n")
    records = list(csv.reader(io.StringIO(content[1:])))
    assert len(records) == 32
    assert records[1][0] == 'Goal, "at last"!'
    assert all(len(record) == 3 and record[1] for record in records)


TABLES = [
    ("id,title,description\n1,A,B\n", ["title + description"], ["A B"]),
    ("text;n\na b c;1\n", ["text"], ["a b c"]),
    ('"3","Oil prices rise","They rise again and again, and again"\n' * 2, ["column 3"], None),
    ("headline\nOne, two\n", ["headline"], ["One"]),
    ("a\tb\n1\tthe longest of the columns\n", ["b"], ["the longest of the columns"]),
    ('text,n\n5" disk,1\n"ab"c,2\n"open quote,3\n', ["text"], ['5" disk', "abc", '"open quote']),
    ("text\r\n\r\nsecond\r\n\r\n", ["text"], ["", "second"]),
]


def test_the_column_with_the_texts_is_found(open_page: OpenPage) -> None:
    page = open_page()
    for source, names, texts in TABLES:
        found = page.evaluate(
            """async (source) => {
                const { Table } = await import("./demo/csv.js");
                const table = new Table(source, true);
                const choices = table.textColumns();
                return [choices.map(({ name }) => name), table.texts(choices[0].columns)];
            }""",
            source,
        )
        assert found[0][: len(names)] == names, source
        assert texts is None or found[1] == texts, source


def test_a_run_shows_progress_waits_when_told_and_can_be_cancelled(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(refusals=True)
    asked = []

    def answer(route: Route) -> None:
        asked.append(route)
        if len(asked) <= 2:  # both requests in flight hear what a full queue says
            refusal = {"error": {"code": "queue_full", "message": "the queue is full"}}
            route.fulfill(status=503, json=refusal, headers={"Retry-After": "1"})
        elif len(asked) < 11:
            route.continue_()  # the later ones are held for ever

    page.route("**/predict/batch", answer)
    choose(page, "many.txt", b"Shares fall\n" * 400)
    page.click("#start")
    until(page, "document.getElementById('run-state').textContent.startsWith('The server is busy')")
    until(page, "progress.value > 0 && progress.value < 1")
    until(page, "cancel.matches(':focus')")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('run-state').textContent.startsWith('Cancelled')")
    records = list(csv.reader(io.StringIO(download(page, tmp_path))))
    done = [record for record in records[1:] if record[1]]
    assert len(records) == 401
    assert 0 < len(done) < 400
    assert {record[3] for record in records[1:] if not record[1]} == {"not classified: cancelled"}
    page.click("#again")
    assert page.is_visible("#choose")


def test_everything_can_be_done_by_keyboard(open_page: OpenPage) -> None:
    page = open_page()
    page.on("filechooser", lambda it: it.set_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"Goal!"}))

    def tab_to(target: str) -> None:
        for _ in range(12):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id || document.activeElement.className") == target:
                assert (
                    page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none" or target == "text"
                )
                return
        raise AssertionError(f"Tab does not reach {target}")

    tab_to("text")
    page.keyboard.type("Goal!")
    until(page, "label.textContent !== 'What will it be?'")
    page.keyboard.press("Escape")
    assert page.input_value("#text") == ""
    assert page.inner_text("#label") == "What will it be?"
    page.keyboard.type("Goal!")
    until(page, "announce.textContent.includes('%')")  # for who hears the page
    tab_to("choose")
    page.keyboard.press("Enter")
    until(page, "start.matches(':focus')")
    page.keyboard.press("Enter")
    until(page, "download.matches(':focus')")
    with page.expect_download():
        page.keyboard.press("Enter")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_letter_has_contrast_in_every_accent(open_page: OpenPage, scheme: str) -> None:
    page = open_page(color_scheme=scheme, reduced_motion="reduce")
    page.fill("#text", HEADLINE)
    page.wait_for_selector("#words li")
    for accent in range(6):
        page.evaluate(
            "accent => document.querySelectorAll('[data-accent]').forEach(one => one.dataset.accent = accent)", accent
        )
        found = contrasts(page)
        assert len(found) > 20
        assert min(found)[0] >= 4.5, min(found)
    grounds = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert grounds == {"light": "rgb(246, 244, 239)", "dark": "rgb(18, 20, 23)"}[scheme]


def test_a_phone_shows_everything_without_scrolling_sideways(open_page: OpenPage) -> None:
    page = open_page(refusals=True, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page.fill("#text", "Donaudampfschifffahrtsgesellschaft" * 8)
    until(page, "/without|No single/.test(why.textContent)")
    choose(page, f"{'long-name' * 12}.csv", b"text,n\n" + b"x" * 400 + b",1\n,2\n")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.click("#start")
    page.wait_for_selector("#download:visible")
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_the_page_says_when_the_server_is_away_and_goes_on_by_itself(open_page: OpenPage, server: httpx.Client) -> None:
    page = open_page(refusals=True)
    page.context.set_offline(True)
    page.fill("#text", HEADLINE)
    until(page, "document.getElementById('notice-text').textContent.startsWith('The server does not answer.')")
    page.context.set_offline(False)
    expect_answer(page, _predict(server, HEADLINE))
    assert page.is_hidden("#notice")


def test_a_missing_model_and_key_are_asked_for_and_recovered_from(
    browser: Browser, start_server: StartServer, folder_copy: Path
) -> None:
    weights = folder_copy / "model.safetensors"
    aside = weights.rename(folder_copy / "aside")
    with start_server(folder_copy, API_KEY=API_KEY) as client, browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{client.base_url}/demo")
        until(page, "document.getElementById('notice-text').textContent.includes('lacks model.safetensors')")
        page.fill("#text", HEADLINE)
        aside.rename(weights)
        client.post("/admin/reload", headers={"Authorization": f"Bearer {API_KEY}"}).raise_for_status()
        for key in ("wrong", f"“{API_KEY}”", API_KEY):
            page.fill("#key", key)
            page.press("#key", "Enter")
        until(page, "confidence.textContent.endsWith('%') && notice.hidden")
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]


def test_the_page_works_below_a_proxys_path_inside_another_page(open_page: OpenPage, server: httpx.Client) -> None:
    with framed_below_a_path(server) as address:
        frame = open_page(address).frame_locator("iframe")
        frame.locator("#text").fill(HEADLINE)
        frame.locator("#confidence", has_text="%").wait_for()
