import struct
from pathlib import Path

import pytest

from common.errors import UserError
from training.parallelism.schedules import SCHEDULES, order_of_actions, stages_of
from training.parallelism.timeline import Costs, draw, rows_of_text, simulate, timelines_of

SIZES = [(2, 2), (2, 8), (3, 6), (4, 4), (4, 8), (8, 32)]


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_micro_batch_goes_forward_and_backward_once_through_every_stage(
    schedule: str, ranks: int, micro_batches: int
) -> None:
    per_rank = SCHEDULES[schedule].stages_per_rank
    order = order_of_actions(schedule, ranks, micro_batches)
    for rank, actions in enumerate(order):
        assert {action.stage for action in actions} == set(stages_of(schedule, rank, ranks))
    everything = [(stage, number) for stage in range(ranks * per_rank) for number in range(micro_batches)]
    for kinds in ("F", "BI", "BW"):
        done = [(a.stage, a.micro_batch) for actions in order for a in actions if a.kind in kinds]
        assert sorted(done) == everything


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_gpipe_and_1f1b_is_the_published_share(schedule: str, ranks: int, micro_batches: int) -> None:
    published = (ranks - 1) / (micro_batches + ranks - 1)
    assert simulate(schedule, ranks, micro_batches).bubble_share == pytest.approx(published, abs=1e-12)


@pytest.mark.parametrize("per_rank", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_stages_a_rank(per_rank: int) -> None:
    published = 3 / (per_rank * 8 + 3)
    assert simulate("interleaved", 4, 8, per_rank).bubble_share == pytest.approx(published, abs=1e-12)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 8), (4, 16), (8, 32)])
def test_each_schedule_leaves_a_smaller_bubble_than_the_one_before(ranks: int, micro_batches: int) -> None:
    share = {schedule: simulate(schedule, ranks, micro_batches).bubble_share for schedule in SCHEDULES}
    assert share["gpipe"] == share["1f1b"] > share["interleaved"] > share["zero_bubble"] >= share["zbv"]


def test_1f1b_keeps_no_more_micro_batches_than_there_are_stages_ahead_and_gpipe_keeps_all() -> None:
    gpipe, one = simulate("gpipe", 4, 16), simulate("1f1b", 4, 16)
    assert [gpipe.activations_kept(rank) for rank in range(4)] == [16] * 4
    assert [one.activations_kept(rank) for rank in range(4)] == [4, 3, 2, 1]


def test_a_rank_begins_when_the_ranks_before_are_done_with_the_first_micro_batch() -> None:
    timeline = simulate("1f1b", 4, 8, costs=Costs(forward=3, backward_input=4, backward_weight=5))
    assert [boxes[0].start for boxes in timeline.ranks] == [0, 3, 6, 9]
    assert timeline.duration == (8 + 3) * 12


def test_the_text_says_which_micro_batch_each_rank_works_on() -> None:
    rows = [row.plain for row in rows_of_text(simulate("1f1b", 2, 2))]
    assert rows == ["0 1 ····0▒▒▒··1▒▒▒", "··0 0▒▒▒1 1▒▒▒····"]


def test_a_schedule_that_cannot_run_says_what_it_needs() -> None:
    for arguments, complaint in [
        (("1f1b", 4, 3, None), r"--micro_batches 3: the 1f1b schedule over 4 ranks needs at least 4"),
        (("interleaved", 8, 9, None), r"--micro_batches 9: .*use a multiple of 4"),
        (("zbv", 7, 8, None), r"--stages 7: 2 stages per rank need a multiple of 2"),
        (("gpipe", 4, 8, 2), r"--stages_per_rank 2: the gpipe schedule needs exactly 1"),
        (("interleaved", 4, 8, 1), r"--stages_per_rank 1: the interleaved schedule needs 2 or more"),
    ]:
        with pytest.raises(UserError, match=complaint):
            timelines_of(*arguments)


def test_the_figure_is_a_png_as_wide_as_promised(tmp_path: Path) -> None:
    draw(timelines_of("all", 2, 4, None), tmp_path / "schedules.png")
    header = (tmp_path / "schedules.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", header[16:20])[0] == 1080
    with pytest.raises(UserError, match="cannot be written"):
        draw(timelines_of("1f1b", 2, 4, None), tmp_path / "no" / "schedules.png")
