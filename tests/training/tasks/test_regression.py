from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

from common.errors import UserError
from common.problem_types import REGRESSION, UnusableRow
from training.tasks import Regression


def fitted(targets: np.ndarray, *, bias: bool = True) -> Regression:
    task = Regression(["price"])
    task.fit(targets, torch.nn.Linear(4, 1, bias=bias))
    return task


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    targets = generator.integers(1, 60, 500) * 1000.0  # with ties
    return ((targets - 30_000) / 17_000 + generator.normal(0, 0.5, 500)).astype(np.float32)[:, None], targets


def test_metrics_are_those_of_scikit_learn_in_the_unit_of_the_data() -> None:
    scores, targets = random_case(0)
    task = fitted(targets)
    found = task.metrics(scores, targets)

    predicted = scores[:, 0] * task.deviation + task.mean
    assert found["mae"] == pytest.approx(mean_absolute_error(targets, predicted))
    assert found["rmse"] == pytest.approx(root_mean_squared_error(targets, predicted))
    assert found["r2"] == pytest.approx(r2_score(targets, predicted))
    assert found["spearman"] == pytest.approx(spearmanr(targets, predicted).statistic)
    assert len(found["by_tenth"]) == 10
    assert np.mean([actual for _, actual in found["by_tenth"]]) == pytest.approx(targets.mean())
    json.dumps(found)


def test_the_finished_layer_gives_the_numbers_themselves() -> None:
    _, targets = random_case(1)
    layer, hidden = torch.nn.Linear(8, 1), torch.randn(500, 8)
    task = fitted(targets)
    trained = task.metrics(layer(hidden).detach().numpy(), targets)
    weight, bias = task.finish(layer.weight, layer.bias)

    written = Regression(["price"]).metrics(torch.nn.functional.linear(hidden, weight, bias).detach().numpy(), targets)
    assert written["mae"] == pytest.approx(trained["mae"], rel=1e-5)


def test_a_layer_without_a_bias_keeps_zero_where_it_is() -> None:
    task = fitted(np.array([3.0, 4.0]), bias=False)

    assert task.mean == 0
    assert task.finish(torch.ones(1, 4), None)[1] is None


def test_the_loss_is_in_standard_deviations_so_the_unit_does_not_matter() -> None:
    scores, targets = random_case(2)
    small, large = (
        fitted(unit * targets).row_losses(torch.from_numpy(scores), torch.from_numpy(unit * targets), 0.0)
        for unit in (1e-3, 1e3)
    )

    assert small.dtype == torch.float32
    torch.testing.assert_close(small, large)
    assert small.mean().item() == pytest.approx(fitted(targets).metrics(scores, targets)["loss"], rel=1e-5)


@pytest.mark.parametrize("cell", [None, "", "many", True, float("nan"), "inf", [1]])
def test_what_is_no_number_is_refused(cell: object) -> None:
    with pytest.raises(UnusableRow, match="must be a number"):
        REGRESSION.read_label(cell)


def test_equal_numbers_are_refused() -> None:
    with pytest.raises(UserError, match="all training rows have the number 2; two are needed"):
        Regression.name_labels("x", [2.0, 2.0], None, "price")
