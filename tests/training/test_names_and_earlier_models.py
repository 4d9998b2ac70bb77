"""A model from the names of its labels, with texts that nobody labelled, and one that extends an earlier model."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from common.errors import ModelLoadError, UserError
from common.model_folder import SEEN_TEXTS_FILE
from common.seen_texts import SeenTexts
from tests.processes import save_blank
from training.config import TrainConfig
from training.data.dataset import SAMPLE, load_data
from training.data.unlabelled import in_sentences
from training.distributed.ranks import Ranks
from training.evaluation.evaluator import evaluate_saved
from training.run.head_start import _mean_of_each
from training.run.start import train

pytest_plugins = ("tests.training.small_teacher",)
Train = Callable[..., dict[str, Any]]
ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")
WORDS = {"storm": ("storm", "wind"), "sun": ("sun", "sand"), "sea": ("sea", "sea")}


def texts(label: str, count: int, first: int = 0) -> list[str]:
    one, other = WORDS[label]
    return [f"{one} and {other} at {'noon' if i % 3 else other} {i}" for i in range(first, first + count)]


def write_rows(path: Path, count: int, *labels: str, first: int = 0) -> Path:
    rows = [f"{text},{label}" for label in labels for text in texts(label, count, first)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["text,label", *rows]))
    return path


@pytest.fixture(scope="module", name="run")
def fixture_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """`run(output, **flags)`: train in this process, and return the run's metrics."""
    threads, cache = torch.get_num_threads(), tmp_path_factory.mktemp("cache")

    def start(output: Path, **flags: Any) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Figure, "savefig", save_blank)
            config = TrainConfig(output_dir=output, cache_dir=cache, device="cpu", precision="fp32", **flags)
            return train(config, use_process_group=False).metrics

    yield start
    torch.set_num_threads(threads)


@pytest.fixture(name="unlabelled")
def fixture_unlabelled(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join([*texts("storm", 40), *texts("sun", 40)]))
    return path


def test_names_and_texts_without_labels_make_a_model_that_says_how_far_to_trust_it(
    teacher: Path, unlabelled: Path, run: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = run(tmp_path / "model", labels="storm, sun", unlabelled=unlabelled, model=teacher)

    shown = capfd.readouterr().out
    assert "none, no row has a label" in shown
    assert re.search(r"learned from 80 texts without a label, and answers \d+% of them as names and rows alone", shown)
    assert "nothing measures this model" in shown
    assert found["test"] == {"rows": 0, "labels": ["storm", "sun"]}
    assert found["train_rows"] == 0
    assert "dataset" not in found
    card = (tmp_path / "model" / "README.md").read_text()
    assert "made from the names of its labels" in card
    assert "no row with a label to test it on" in card


def test_texts_without_labels_show_what_the_names_mean(
    teacher: Path, unlabelled: Path, run: Train, tmp_path: Path
) -> None:
    run(tmp_path / "names", labels="storm, sun", model=teacher)
    run(tmp_path / "texts", labels="storm, sun", model=teacher, unlabelled=unlabelled)

    rows = write_rows(tmp_path / "rows.csv", 30, "storm", "sun", first=100)
    names, both = (evaluate_saved(tmp_path / one, str(rows), ALONE, quiet=True) for one in ("names", "texts"))
    assert both["accuracy"] > 0.8 > names["accuracy"]  # the weights of the encoder are random


def test_names_alone_are_compared_with_texts_as_the_encoder_was_trained_to_be_read(run: Train, tmp_path: Path) -> None:
    run(tmp_path / "model", labels=",".join(load_data(SAMPLE).label_names), model="starter")

    # The mean of all tokens gives 0.33.
    assert evaluate_saved(tmp_path / "model", SAMPLE, ALONE, quiet=True)["accuracy"] > 0.55


def test_a_label_without_rows_is_learned_from_its_name(run: Train, tmp_path: Path) -> None:
    data = load_data(SAMPLE)
    for split, rows in (("train", data.train), ("test", data.test)):
        lines = []
        for label, name in enumerate(data.label_names):
            chosen = np.flatnonzero(rows.labels == label)[: 12 if split == "train" else 30]
            if name != "Sports" or split == "test":
                lines += [json.dumps({"text": rows.texts[row], "label": name}) for row in chosen]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    flags = {"dataset": str(tmp_path), "model": "starter", "method": "head"}
    found = run(tmp_path / "model", labels=",".join(data.label_names), **flags)["test"]["per_class"]

    assert found["Sports"]["recall"] > 0.3
    assert min(found[name]["recall"] for name in ("World", "Business", "Sci/Tech")) > 0.3


def test_a_row_with_a_label_that_is_not_named_is_refused(teacher: Path, run: Train, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.csv", 20, "storm", "sea")
    with pytest.raises(UserError, match="'sea'"):
        run(tmp_path / "model", dataset=str(rows), model=teacher, labels="storm,sun")


def test_numbers_are_no_names_to_learn_from(teacher: Path, run: Train, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'1' says nothing of the texts"):
        run(tmp_path / "model", labels="TV, 1", model=teacher)


def test_the_names_of_labels_may_stand_in_a_file(teacher: Path, run: Train, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("storm, heavy\nsun\n")
    assert run(tmp_path / "model", labels=str(names), model=teacher)["test"]["labels"] == ["storm, heavy", "sun"]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("billing_question", ["This is about billing question."]),
        ("Sci/Tech", ["This is about Sci.", "This is about Tech."]),
        ("delivery w/o refund", ["This is about delivery w o refund."]),
        ("Zahlung/Überweisung", ["This is about Zahlung.", "Überweisung"]),
    ],
)
def test_a_name_is_read_in_a_sentence_and_one_with_a_slash_as_two_names(name: str, texts: list[str]) -> None:
    assert in_sentences(name) == texts


def test_each_name_has_the_mean_of_what_its_sentences_say() -> None:
    read = {"head": np.array([[1, 3], [2, 0], [4, 2], [5, 5]], dtype=np.float32)}

    means = _mean_of_each(np.array([0, 1, 1, 2]), read)

    assert means["head"].tolist() == [[1, 3], [3, 1], [5, 5]]
    assert means["head"].dtype == np.float32


def test_texts_without_labels_help_few_rows(
    teacher: Path, unlabelled: Path, run: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "rows.csv", 6, "storm", "sun", first=200)
    found = run(tmp_path / "model", dataset=str(rows), unlabelled=unlabelled, model=teacher)

    assert "80 texts without a label" in capfd.readouterr().out
    assert found["train_rows"] == 10  # the texts show the head how labels read; no step trains on them
    assert found["fitted_head"]["num_texts"] == 80


@pytest.fixture(scope="module", name="earlier")
def fixture_earlier(teacher: Path, tmp_path_factory: pytest.TempPathFactory, run: Train) -> Path:
    """A model of two labels, next to the rows that it was trained on."""
    folder = tmp_path_factory.mktemp("earlier")
    write_rows(folder / "rows" / "train.csv", 40, "storm", "sun")
    write_rows(folder / "rows" / "test.csv", 20, "storm", "sun", first=300)
    run(folder / "model", dataset=str(folder / "rows"), model=teacher, max_length=32)
    return folder


def test_an_earlier_model_learns_a_new_label_and_the_run_says_what_the_old_ones_lost(
    earlier: Path, run: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    new = write_rows(tmp_path / "new.csv", 12, "sea", first=400)
    found = run(tmp_path / "more", from_model=str(earlier / "model"), dataset=str(new))

    shown = capfd.readouterr().out
    assert found["test"]["labels"] == ["storm", "sun", "sea"]
    assert found["test"]["per_class"]["sea"]["recall"] == 1.0
    assert found["test"]["rows"] == 41  # those of the earlier data, and one of the new rows
    assert found["earlier"]["rows"] == 40
    assert set(found["earlier"]["recalls"]) == {"storm", "sun"}
    assert found["earlier"]["after"] > 0.9
    assert found["max_length"] == 32  # as it was trained
    assert "which knows storm, sun" in shown  # a label that is misspelt would be a new one
    assert "Its old labels" in shown
    assert "right before" in shown


def test_a_model_has_seen_its_training_and_validation_texts_and_those_without_a_label_but_no_test_text(
    teacher: Path, unlabelled: Path, run: Train, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows" / "train.csv", 8, "storm", "sun", first=100)
    write_rows(tmp_path / "rows" / "validation.csv", 4, "storm", "sun", first=200)
    write_rows(tmp_path / "rows" / "test.csv", 4, "storm", "sun", first=300)
    run(tmp_path / "model", dataset=str(tmp_path / "rows"), unlabelled=unlabelled, model=teacher, method="head")

    seen = SeenTexts.read(tmp_path / "model")
    read = [*texts("storm", 8, 100), *texts("sun", 4, 200), *texts("sun", 40)]
    assert seen.which_seen(read).all()
    assert seen.which_seen([text.upper() for text in read]).all()
    assert not seen.which_seen(texts("storm", 4, 300)).any()
    assert len(seen.hashes) == 16 + 8 + 80


def test_a_model_that_began_as_another_has_seen_its_texts_too(earlier: Path, run: Train, tmp_path: Path) -> None:
    new = write_rows(tmp_path / "new.csv", 20, "storm", "sun", first=500)
    run(tmp_path / "model", dataset=str(new), model=earlier / "model", method="head", max_length=32)

    seen = SeenTexts.read(tmp_path / "model")
    assert seen.which_seen(texts("storm", 40)).all()
    assert not seen.which_seen(texts("storm", 20, 300)).any()  # its test rows
    assert seen.which_seen(texts("storm", 20, 500)).sum() == 18  # the others are test rows


def test_a_damaged_list_of_seen_texts_is_found_before_the_run_trains(earlier: Path, run: Train, tmp_path: Path) -> None:
    model = Path(shutil.copytree(earlier / "model", tmp_path / "damaged"))
    (model / SEEN_TEXTS_FILE).write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"damaged/seen_texts\.bin: is not a list of seen texts; copy"):
        run(tmp_path / "model", dataset=str(earlier / "rows"), model=model)
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_an_extended_model_can_be_extended_again(earlier: Path, run: Train, tmp_path: Path) -> None:
    first = write_rows(tmp_path / "first.csv", 12, "sea", first=400)
    again = write_rows(tmp_path / "again.csv", 12, "sea", "storm", first=500)
    run(tmp_path / "one", from_model=str(earlier / "model"), dataset=str(first))
    found = run(tmp_path / "two", from_model=str(tmp_path / "one"), dataset=str(again))

    assert set(found["earlier"]["recalls"]) == {"storm", "sun", "sea"}
    assert found["test"]["accuracy"] > 0.9
    assert [Path(one["dataset"]).name for one in found["learned_before"]] == ["first.csv", "rows"]


def test_without_the_earlier_data_rows_of_all_its_labels_must_be_given(
    earlier: Path, run: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    moved = (earlier / "rows").rename(earlier / "elsewhere")
    try:
        new = write_rows(tmp_path / "new.csv", 12, "sea", "sun", first=400)
        with pytest.raises(UserError, match="give rows of these labels too"):
            run(tmp_path / "more", from_model=str(earlier / "model"), dataset=str(new))
        new = write_rows(tmp_path / "all.csv", 12, "sea", "sun", "storm", first=400)
        run(tmp_path / "more", from_model=str(earlier / "model"), dataset=str(new))
        assert "the new rows stand for all" in capfd.readouterr().out
    finally:
        moved.rename(earlier / "rows")


def test_no_test_row_of_the_earlier_data_is_trained_on(earlier: Path, run: Train, tmp_path: Path) -> None:
    new, tested = tmp_path / "new.csv", (earlier / "rows" / "test.csv").read_text()
    new.write_text(tested + "\n" + "\n".join(f"{text},sea" for text in texts("sea", 12, 400)))
    found = run(tmp_path / "more", from_model=str(earlier / "model"), dataset=str(new))

    assert found["train_rows"] <= 80 + 12
    assert found["test"]["rows"] <= 40 + 6
