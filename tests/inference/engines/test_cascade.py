"""A small model that answers the texts that it is sure of, in front of a big one: the library and its refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.calibration import CalibrationError
from common.errors import ModelLoadError
from common.model_folder import MANIFEST_FILE, SMALL_FOLDER
from common.text import PAIR_KEY
from common.windows import Windows
from inference.engines import native
from inference.engines.model_loader import Cascade, ModelLoader
from inference.engines.native.library import library_path
from tests.inference.cascades import NEWS, make_artefact, make_cascade, recalibrated
from tests.inference.conftest import LABELS, THRESHOLDS, TINY, MakeFolder

LONG = "Shares fall and oil prices rise again on Wall Street. " * 10  # beyond the 24 ids of the tiny model
# Only the kernels answer a text to the bit as they do among other texts; NumPy does not.
to_the_bit = pytest.mark.skipif(library_path() is None, reason=native.is_supported()[1])
ASKED: dict[str, Any] = {"coverage": 0.98, "max_error": "2%", "familiarity": True}


@pytest.fixture(scope="module")
def tiny(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artefact that has the labels of `NEWS`, another tokenizer and no calibration."""
    return make_artefact(model_folder, tmp_path_factory.mktemp("artefacts") / "tiny")


def edit_manifest(artefact: Path, **changes: Any) -> None:
    path = artefact / MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# What it answers


@to_the_bit
@pytest.mark.parametrize("small_is", ["tiny", "news"])
def test_each_text_is_answered_as_the_model_that_answers_it_does_alone(
    small_is: str, tiny: Path, tmp_path: Path, texts: list[str]
) -> None:
    big, small = (NEWS, tiny) if small_is == "tiny" else (tiny, NEWS)
    alone = {"big": ModelLoader(big), "small": ModelLoader(small)}
    answers = {which: model.predict_batch(texts) for which, model in alone.items()}
    # Between two of the small model's answers, so that both models have some to give.
    confidences = sorted(one["confidence"] for one in answers["small"])
    threshold = sum(confidences[2:4]) / 2
    model = ModelLoader(make_cascade(big, small, tmp_path / "cascade", threshold))

    is_cut = [one.truncated for one in alone["small"].tokenizer.encode(texts)]
    by = [
        "small" if one["confidence"] >= threshold and not cut else "big"
        for one, cut in zip(answers["small"], is_cut, strict=True)
    ]
    assert set(by) == {"big", "small"}
    expected = [answers[which][i] for i, which in enumerate(by)]
    assert model.predict_batch(texts) == expected
    assert [model.predict(text) for text in texts] == expected
    assert model.predict_batch([]) == []


@pytest.mark.parametrize(("threshold", "by_big"), [(0.0, False), (1.0, True)])
def test_a_threshold_may_leave_all_texts_to_one_of_them(
    threshold: float, by_big: bool, tiny: Path, tmp_path: Path, texts: list[str]
) -> None:
    short = [text for text in texts if len(text) < 80]
    expected = ModelLoader(NEWS if by_big else tiny).predict_batch(short)
    model = ModelLoader(make_cascade(NEWS, tiny, tmp_path / "cascade", threshold))
    assert model.predict_batch(short) == expected


def test_a_text_that_the_small_model_would_truncate_goes_to_the_big_one(tiny: Path, tmp_path: Path) -> None:
    model = ModelLoader(make_cascade(NEWS, tiny, tmp_path / "cascade", 0.0))
    assert model.predict(LONG) == ModelLoader(NEWS).predict(LONG)
    assert model.predict("Goal!") == ModelLoader(tiny).predict("Goal!")


def test_no_text_is_left_to_a_small_model_that_answers_with_nan() -> None:
    cascade = Cascade(None, 0.6, (), 0.005)
    values = np.array([[0.6, 0.4], [np.nan, np.nan], [0.41, 0.59], [0.1, 0.9]])
    assert cascade.passed_on(values, [False, False, False, True]) == [1, 2, 3]


def test_a_text_that_either_model_cannot_read_is_blank(folder_copy: Path, tmp_path: Path) -> None:
    content = json.loads((folder_copy / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[^a-z ]"}, "content": ""}
    (folder_copy / "tokenizer.json").write_text(json.dumps(content))
    letters = make_artefact(folder_copy, tmp_path / "letters")
    for number, (big, small) in enumerate([(NEWS, letters), (letters, NEWS)]):
        model = ModelLoader(make_cascade(big, small, tmp_path / f"cascade{number}", 1.0))
        with pytest.raises(ValueError, match=r"texts\[1\] is blank"):
            model.predict_batch(["oil", "1918"])


@to_the_bit
def test_promises_are_those_of_both_and_familiarity_is_that_of_the_model_that_answers(
    tmp_path: Path, texts: list[str]
) -> None:
    # The promises of the cascade, in the manifest of the big model, are not those of the big model alone.
    points = {"0.02": {"max_error": 0.02, "threshold": 0.6}}
    coverage = [{"coverage": 0.99, "threshold": 0.01, "mean_size": 2.0}]
    big = recalibrated(NEWS, tmp_path / "big", operating_points=points, coverage=coverage)
    less_sure = recalibrated(NEWS, tmp_path / "less_sure", temperature=2.0)
    small, plain = ModelLoader(less_sure), ModelLoader(NEWS)
    confidences = sorted(one["confidence"] for one in small.predict_batch(texts))
    model = ModelLoader(make_cascade(big, less_sure, tmp_path / "cascade", confidences[3]))

    by_small = [one["confidence"] >= confidences[3] for one in small.predict_batch(texts)]
    assert {*by_small} == {True, False}
    found = model.predict_batch(texts, **ASKED)
    for text, one, is_small in zip(texts, found, by_small, strict=True):
        alone = (small if is_small else plain).predict(text, familiarity=True)
        assert one["probabilities"] == alone["probabilities"]
        assert one["familiarity"] == alone["familiarity"]
        assert one["coverage"] == 0.99
        assert {label for label, value in alone["probabilities"].items() if value >= 0.01} <= set(one["set"])
        is_foreign, is_unsure = alone["familiarity"] < 0.01, alone["confidence"] < 0.6
        assert one["abstained"] == ("unfamiliar" if is_foreign else "uncertain" if is_unsure else None)


def test_familiarity_is_not_promised_where_only_one_of_them_knows_it(tiny: Path, tmp_path: Path) -> None:
    model = ModelLoader(make_cascade(NEWS, tiny, tmp_path / "cascade", 0.0))
    with pytest.raises(CalibrationError, match="cannot tell how familiar"):
        model.predict("Goal!", familiarity=True)
    # What does not need it is given.
    assert model.predict("Goal!", coverage=0.9)["coverage"] == 0.9
    assert "abstained" in model.predict("Goal!", max_error=0.05)


def test_the_info_names_both_and_the_revision_depends_on_the_threshold(tiny: Path, tmp_path: Path) -> None:
    infos = [
        ModelLoader(make_cascade(NEWS, tiny, tmp_path / f"cascade {threshold}", threshold)).info
        for threshold in (0.8, 0.9)
    ]
    alone = ModelLoader(NEWS).info
    assert len({one["revision"] for one in (*infos, alone)}) == 3
    for info in infos:
        assert info["name"] == alone["name"]
        assert info["reason"] == f"{alone['reason']}; tiny answers the texts that it is sure of"


# What is refused


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as refused:
        ModelLoader(folder)
    line = str(refused.value)
    assert "\n" not in line
    assert line.endswith("; write it again: python -m inference.cascade")
    return line


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"threshold": "0.9"}, "'0.9' is not a number that is at least 0"),
        ({"threshold": None}, "None is not a number that is at least 0"),
        ({"threshold": float("nan")}, "nan is not a number"),
        ({"max_disagreement": -1}, "-1 is not a number that is at least 0"),
        ({"stricter": [0.9, "1"]}, "'1' is not a number that is at least 0"),
        ({"stricter": 1.0}, "TypeError"),
        ({"small": "news"}, "TypeError"),
        ({"small": {}}, "KeyError: 'manifest_sha256'"),
    ],
)
def test_a_damaged_record_is_refused_in_one_line(
    changes: dict[str, Any], what: str, tiny: Path, tmp_path: Path
) -> None:
    folder = make_cascade(NEWS, tiny, tmp_path / "cascade")
    record = json.loads((folder / MANIFEST_FILE).read_text())["cascade"] | changes
    edit_manifest(folder, cascade=record)
    line = refusal(folder)
    assert line.startswith(f"{folder / MANIFEST_FILE}: its cascade is damaged (")
    assert what in line


@pytest.mark.parametrize(
    "damage",
    [
        lambda small: shutil.rmtree(small),
        lambda small: (small / MANIFEST_FILE).unlink(),
        lambda small: edit_manifest(small, created="2027-01-01T00:00:00+00:00"),
    ],
)
def test_a_small_model_that_is_missing_or_another_one_is_refused(
    damage: Callable[[Path], object], tiny: Path, tmp_path: Path
) -> None:
    folder = make_cascade(NEWS, tiny, tmp_path / "cascade")
    damage(folder / SMALL_FOLDER)
    assert refusal(folder).startswith(f"{folder / SMALL_FOLDER}: is missing, or is not the small model that")


def test_a_small_model_that_answers_another_question_is_refused(make_folder: MakeFolder, tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        (
            "their labels must be the same in the same order, but they have World, Sports",
            {"labels": [*LABELS[1::-1], *LABELS[2:]]},
        ),
        ("one reads pairs of texts, and the other one single texts", {PAIR_KEY: 3}),
        (
            "only models that give one label can be a cascade",
            {"problem_type": "multi_label_classification", "label_thresholds": THRESHOLDS},
        ),
    ]
    for number, (what, settings) in enumerate(cases):
        model = make_folder("DistilBert", **TINY, **settings)
        small = make_artefact(model, tmp_path / f"small{number}")
        assert what in refusal(make_cascade(NEWS, small, tmp_path / f"cascade{number}"))
        shutil.rmtree(model)


def test_a_model_that_reads_long_texts_in_windows_cannot_be_in_a_cascade(tiny: Path) -> None:
    big, small = ModelLoader(NEWS), ModelLoader(tiny)
    assert Cascade.why_not(big, small) == ""
    small.tokenizer.windows = Windows.of_length(24, "classifier")
    assert "in windows cannot be in a cascade" in Cascade.why_not(big, small)


def test_a_cascade_is_not_the_small_model_of_another_one(tiny: Path, tmp_path: Path) -> None:
    small = make_cascade(tiny, tiny, tmp_path / "small")
    assert "one of them is a cascade already" in refusal(make_cascade(NEWS, small, tmp_path / "cascade"))
