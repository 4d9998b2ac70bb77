import base64
import hashlib
import html.parser
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from training.monitoring.events import read_metrics
from training.monitoring.plots import LIGHT, Curves, draw_all
from training.monitoring.records import calibration_in_words, wilson_interval
from training.monitoring.report import ReportData, WrongText, write_report
from training.tasks.task import RowAnswer

Evaluation = Callable[..., dict[str, Any]]
MakeReport = Callable[..., ReportData]
WriteRun = Callable[..., Path]

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)> & {{ 7 * 7 }} $\\frac{1}$"
PLOTS = ["confusion_matrix", "gradient_norm", "learning_rate", "loss", "reliability", "throughput", "validation"]


class _Page(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture(scope="module")
def run_dir(
    tmp_path_factory: pytest.TempPathFactory,
    write_run: WriteRun,
    evaluation: Evaluation,
    report_data: MakeReport,
) -> Path:
    folder = write_run(tmp_path_factory.mktemp("run"))
    texts = [WrongText(HOSTILE, RowAnswer(HOSTILE, "Sports", 0.999, surprise=0.999), "confidence")]
    for number in range(40):
        answer = RowAnswer("World", "Sports", number / 100, surprise=number / 100)
        texts.append(WrongText(f"text number {number}.", answer, "confidence"))
    write_report(folder, report_data(evaluation(), texts))
    return folder


@pytest.fixture(scope="module")
def page(run_dir: Path) -> _Page:
    return _Page((run_dir / "report.html").read_text(encoding="utf-8"))


def test_the_report_asks_the_network_for_nothing(page: _Page) -> None:
    addresses = [
        value
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in ("src", "srcset", "href", "action")
    ]
    assert addresses
    assert all(address.startswith("data:image/png;base64,") for address in addresses if address)
    assert not {"link", "iframe"} & {tag for tag, _ in page.tags}


def test_the_report_runs_no_script_but_that_of_its_button(run_dir: Path, page: _Page) -> None:
    text = (run_dir / "report.html").read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [meta["content"] for tag, meta in page.tags if tag == "meta" and "http-equiv" in meta]

    assert policy.endswith(f"; script-src 'sha256-{digest}'")
    assert text.count("<script") == 1


def test_a_hostile_text_is_escaped_in_the_report(run_dir: Path, page: _Page) -> None:
    assert page.words.count(HOSTILE) == 2
    assert "<script>alert" not in (run_dir / "report.html").read_text()
    assert not any("onerror" in attributes for _, attributes in page.tags)


def test_the_report_shows_twenty_wrong_texts_surest_first(page: _Page) -> None:
    numbers = [int(number) for number in re.findall(r"text number (\d+)\.", page.words)]
    assert numbers == list(range(39, 20, -1))


def test_the_report_is_named_after_the_run_and_begins_with_its_command(run_dir: Path, page: _Page) -> None:
    title = "DistilBERT on AG News: accuracy 90.00%"

    assert page.words.count(title) == 2  # of the tab and of the page
    assert page.words.index("training/run_ddp.sh 2 --dataset ag_news") < page.words.index("Test accuracy")
    assert "15 more" in page.words  # five wrong texts are open
    assert "All 3 fields" in page.words


def test_the_report_holds_the_figures_of_the_run(page: _Page) -> None:
    for figure in (
        "90.00%",
        "95% interval 85.06% to 93.43%",
        "2.00%",
        "answers with 55% confidence on average and is right 90% of the time: too modest; more epochs help",
        "2m 40s",
        "100.0",
        "Sci/Tech",
        "ag_news",
        "2.13.0",
    ):
        assert figure in page.words


def test_the_report_says_what_is_wrong_with_the_data_and_shows_rows(
    write_run: WriteRun, evaluation: Evaluation, report_data: MakeReport, tmp_path: Path
) -> None:
    rows = {"row": "train row 9", "other_row": "train row 3", "near": False}
    texts = {"text": HOSTILE, "other_text": HOSTILE, "label": HOSTILE, "other_label": "Sports"}
    counts = {"count": 1, "equal": 1, "near": 0, "splits": {"labelled": {"count": 1, "of": 46}}}
    figures = {
        "rows": {"training": 40, "test": 6},
        "near_duplicates": False,
        "conflicts": {**counts, "rows": [rows | texts]},
    }

    write_report(write_run(tmp_path), replace(report_data(evaluation()), figures=figures))

    page = _Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "Rows: 40 training, 6 test" in page.words
    assert "Conflicts: 1 of 46 labelled rows repeat an earlier text, but with another label" in page.words
    assert "train row 3" in page.words
    assert page.words.count(HOSTILE) == 2
    assert not any("onerror" in attributes for _, attributes in page.tags)


def test_plots_are_whole_pngs_of_sensible_size(run_dir: Path) -> None:
    paths = sorted((run_dir / "plots").iterdir())
    assert [path.name for path in paths] == [f"{name}.png" for name in PLOTS]
    for path in paths:
        height, width, _ = matplotlib.image.imread(path).shape
        assert 500 < height < 1500
        assert 500 < width < 1500
        assert 5_000 < path.stat().st_size < 300_000


def test_nothing_half_written_is_left_beside_the_report(run_dir: Path) -> None:
    assert not [path for path in run_dir.rglob("*") if path.name.startswith(".")]


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
@pytest.mark.parametrize(("steps", "epochs", "classes"), [(1, 1, 2), (0, 2, 2), (0, 0, 2), (3000, 2, 30)])
def test_runs_of_any_size_have_a_report(
    tmp_path: Path,
    write_run: WriteRun,
    evaluation: Evaluation,
    report_data: MakeReport,
    steps: int,
    epochs: int,
    classes: int,
) -> None:
    labels = [f"a class with quite a long name, worth ${number} & _more_$" for number in range(classes)]
    write_run(tmp_path, steps=steps, epochs=epochs, labels=labels)
    path = write_report(tmp_path, report_data(evaluation(labels)))
    assert labels[-1] in _Page(path.read_text(encoding="utf-8")).words


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
def test_a_run_of_losses_that_are_not_finite_has_a_report(
    tmp_path: Path, write_run: WriteRun, evaluation: Evaluation, report_data: MakeReport
) -> None:
    write_run(tmp_path, steps=20, epochs=1)
    metrics = tmp_path / "metrics.jsonl"
    fields = "loss|grad_norm|samples_per_second|tokens_per_second"
    metrics.write_text(re.sub(rf'"({fields})": [\d.e-]+', r'"\1": null', metrics.read_text()))
    assert read_metrics(tmp_path)[0]["grad_norm"] is None
    page = _Page(write_report(tmp_path, report_data(evaluation())).read_text())
    assert "not finite" in page.words


def test_a_resumed_run_is_one_curve(
    tmp_path: Path, write_run: WriteRun, evaluation: Evaluation, report_data: MakeReport
) -> None:
    write_run(tmp_path, steps=20, epochs=2)
    epoch = next(line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if '"epoch"' in line[:20])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(epoch + "\n")
    page = _Page(write_report(tmp_path, report_data(evaluation())).read_text())
    # A heading, two epochs; a heading, four classes.
    assert [tag for tag, _ in page.tags].count("tr") == 3 + 5


@pytest.mark.parametrize(
    ("confidence", "verdict"),
    [(0.6, "too modest; more epochs help"), (0.88, "as it should be"), (0.99, "too sure; fewer epochs or --label")],
)
def test_calibration_is_told_with_its_direction(evaluation: Evaluation, confidence: float, verdict: str) -> None:
    found = calibration_in_words(evaluation() | {"reliability": [[100, confidence, 0.9], [100, confidence, 0.9]]})

    assert found.startswith(
        f"answers with {confidence:.0%} confidence on average and is right 90% of the time: {verdict}"
    )


def test_wilson_interval_agrees_with_the_published_formula() -> None:
    assert wilson_interval(0.9, 200) == pytest.approx((0.8506, 0.9343), abs=1e-4)
    assert wilson_interval(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson_interval(0.0, 0) == (0.0, 1.0)


def test_a_label_cannot_command_the_terminal_through_a_warning_of_a_plot(recwarn: pytest.WarningsRecorder) -> None:
    test = {"labels": ["a\x1b[31m", "b"], "confusion_matrix": [[1, 0], [0, 1]]}
    draw_all(Curves([], []), test, LIGHT)
    assert not [warning for warning in recwarn if "\x1b" in str(warning.message) or "Glyph 27" in str(warning.message)]
