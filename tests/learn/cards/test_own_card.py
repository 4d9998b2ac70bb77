"""A card of the user's own: named by its import path, it runs on the ranks like the twelve."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from common.errors import TrainingFailure, UserError
from learn.cards.history import History
from learn.cards.pipeline import Pipeline
from learn.cards.report import run_picture
from learn.cards.runner import Runner
from tests.learn.cards.small_runs import OWN_CARD, small_pipeline, with_own_card


def own_pipeline(folder: Path, code: str = OWN_CARD) -> Pipeline:
    return with_own_card(folder, small_pipeline(folder), code)


def test_a_card_of_the_training_loop_changes_the_gradients_of_every_rank(tmp_path: Path) -> None:
    pipeline = own_pipeline(tmp_path)
    history = History(pipeline)
    with Runner(pipeline, tmp_path / "runs", history.record) as runner:
        runner.run()
    gradients = [
        [runner.storage.tensors(f"own/rank_{rank}/{moment}")["gradients/0.weight"] for moment in ("before", "after")]
        for rank in (0, 1)
    ]
    [picture] = run_picture(runner, history)["pictures"]["own"]

    assert [node.id for node in pipeline.loop] == ["forward", "backward", "allreduce", "own", "step"]
    for before, after in gradients:
        assert torch.equal(after, before / 2)
        assert before.abs().sum() > 0
    assert [moment["title"] for moment in picture["held"]["moments"]] == ["before", "after"]
    assert (picture["pass"], picture["preview"]["rows"]) == ("epoch 1, batch 1", [[0], [1]])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(BaseCard[Config])", "", "must be a class that derives from learn.cards.base.BaseCard"),
        ("def execute", "def executes", "the class lacks execute"),
        ('execution_mode = "distributed"', "", "must set execution_mode to 'local' or 'distributed'"),
        ('execution_mode = "distributed"', 'execution_mode = "local"', "a card of the training loop must be"),
        ("class HalveGradients", "class Halve", r"cannot be imported \(AttributeError: .*; give module:name"),
        ("import Field", "import Feild", r"cannot be imported \(ImportError: "),
        ("config_schema = Config", "config_schema = 7", "the class or its config_schema cannot be used"),
    ],
)
def test_a_class_that_is_no_card_is_named_in_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        own_pipeline(tmp_path, OWN_CARD.replace(old, new))

    assert re.match(r"\S+own.yaml: card own_\w+:HalveGradients: [^\n]+$", str(raised.value))


def test_a_card_that_feeds_the_loop_from_behind_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="node step: runs in the training loop, but takes what own makes after the loop"
    ):
        own_pipeline(tmp_path, OWN_CARD.replace("in_training_loop = True", ""))


def test_a_card_that_fails_is_named_with_its_rank(tmp_path: Path) -> None:
    code = OWN_CARD.replace("return dict(inputs)", "return {}[7]")
    with (
        Runner(own_pipeline(tmp_path, code), tmp_path / "runs") as runner,
        pytest.raises(
            TrainingFailure, match=r"^rank \d, card own_\w+:HalveGradients \(node own\): KeyError: 7; traceback"
        ),
    ):
        runner.run()


def test_outputs_that_were_not_promised_are_named(tmp_path: Path) -> None:
    code = OWN_CARD.replace("return dict(inputs)", 'return {"gradients": 1}')
    message = r"execute must return a dictionary of its outputs \(synced_gradients\), got: gradients"
    with Runner(own_pipeline(tmp_path, code), tmp_path / "runs") as runner, pytest.raises(UserError, match=message):
        runner.run()


def test_a_preview_that_fails_says_so_and_leaves_the_rest_of_the_page(tmp_path: Path) -> None:
    pipeline = own_pipeline(tmp_path, OWN_CARD.replace('["rank"], ', ""))
    history = History(pipeline)
    with Runner(pipeline, tmp_path / "runs", history.record) as runner:
        runner.run()
    pictures = run_picture(runner, history)["pictures"]

    assert pictures["own"][0]["preview"]["summary"]["get output preview failed"].startswith("TypeError: ")
    assert len(pictures) == 13
