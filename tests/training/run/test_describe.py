from types import SimpleNamespace

import pytest

from training.config import TrainConfig
from training.run.describe import describe_warmup


@pytest.mark.parametrize(
    ("warmup", "total_steps", "is_too_long"), [(1000, 2, True), (1000, 1000, False), (0.06, 2, False), (0, 2, False)]
)
def test_a_warm_up_longer_than_the_run_is_noted_with_what_to_give_instead(
    warmup: float, total_steps: int, is_too_long: bool
) -> None:
    plan = SimpleNamespace(total_steps=total_steps, peak_learning_rate=5e-5)
    note = describe_warmup(TrainConfig(warmup=warmup), plan).get("Warm-up", "")
    what = "--warmup 1000 is longer than the run of 2 steps, so the learning rate only reaches 1e-07; give a share"
    assert note.startswith(what) if is_too_long else not note
