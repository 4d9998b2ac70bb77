"""What a card's picture shows: every moment that its title promises."""

from pathlib import Path

from learn.cards.picture import card_picture
from learn.cards.runner import Runner
from tests.learn.cards.small_runs import small_pipeline


def stepped_past(runner: Runner, node: str) -> Runner:
    while node not in runner.outputs:
        runner.step()
    return runner


def test_one_rank_alone_has_a_before_and_an_after_too(tmp_path: Path) -> None:
    with stepped_past(Runner(small_pipeline(tmp_path, workers=1), tmp_path), "allreduce") as runner:
        titles = {
            node: [moment["title"] for moment in card_picture(runner, runner.pipeline.node(node))[0]["held"]["moments"]]
            for node in ("group", "allreduce")
        }

    assert titles == {
        "group": ["before the broadcast", "after the broadcast"],
        "allreduce": ["before the all-reduce", "after the all-reduce"],
    }


def test_every_picture_of_the_loop_says_of_which_batch_it_is(tmp_path: Path) -> None:
    pipeline = small_pipeline(tmp_path, batch_size=60)
    with stepped_past(Runner(pipeline, tmp_path), "step") as runner:
        runner.step()
        passes = {
            node.id: [picture["pass"] for picture in card_picture(runner, node)] for node in runner.pipeline.nodes[4:9]
        }

    first, second = "epoch 1, batch 1", "epoch 1, batch 2"
    assert passes == {
        "group": [""],
        "forward": [first, second],
        "backward": [first],
        "allreduce": [first],
        "step": [first],
    }
