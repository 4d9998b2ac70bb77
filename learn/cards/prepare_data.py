"""Card 2: keep some rows for the test, and bring the features to one scale."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field

from common.errors import UserError
from learn.cards.base import BaseCard, CardConfig, Preview, Values
from learn.cards.storage import Storage


class PrepareDataConfig(CardConfig):
    """How the rows are divided."""

    test_ratio: float = Field(0.2, gt=0, lt=1, description="share of each class that is kept for the test")
    normalize: bool = Field(True, description="bring every feature to mean 0 and deviation 1")
    batch_size: int = Field(16, ge=1, description="rows of a global batch, that is, over all ranks together")
    seed: int = Field(42, ge=0, le=2**32, description="of the division and of the order in which rows are trained on")


class PrepareData(BaseCard[PrepareDataConfig]):
    """Divides the rows class by class, and normalises with what the training rows alone say."""

    card_type = "dist_prepare_data"
    display_name = "Prepare data"
    description = "Keeps a share of every class for the test, and brings the features to one scale."
    look_at = "Mean and deviation are those of the training rows: the test rows must not be known before the test."
    category = "data"
    execution_mode = "local"
    output_view_type = "table"
    config_schema = PrepareDataConfig
    input_schema: ClassVar = {"dataset": "dataset"}
    output_schema: ClassVar = {"prepared_data": "prepared_data"}

    def execute(self, config: PrepareDataConfig, inputs: Values, storage: Storage) -> dict[str, Any]:
        """Divide and normalise; every tensor's rows are those of ``train_rows`` or ``test_rows`` in the data set."""
        dataset = inputs["dataset"]
        tensors = storage.tensors(dataset["tensors"])
        features, labels = tensors["features"], tensors["labels"]
        train, test = stratified_split(labels, dataset["classes"], config.test_ratio, config.seed)
        mean, deviation = torch.zeros(features.shape[1]), torch.ones(features.shape[1])
        if config.normalize:
            mean, deviation = mean_and_deviation(features[train])
            features = (features - mean) / deviation
        prepared = {"train_rows": train, "train_features": features[train], "train_labels": labels[train]}
        prepared |= {"test_rows": test, "test_features": features[test], "test_labels": labels[test]}
        key = storage.save_tensors("prepared", prepared | {"mean": mean, "deviation": deviation})
        facts = {"tensors": key, "train_rows": len(train), "test_rows": len(test)}
        facts |= {"batch_size": config.batch_size, "seed": config.seed}
        return {"prepared_data": facts | {name: dataset[name] for name in ("features", "classes")}}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        """The scale of each feature before, and of its training rows afterwards."""
        prepared = outputs["prepared_data"]
        tensors = storage.tensors(prepared["tensors"])
        found = (tensors["mean"], tensors["deviation"], tensors["train_features"].mean(0))
        columns = [[round(value, 4) for value in column.double().tolist()] for column in found]
        return self.preview(
            ["feature", "mean", "deviation", "mean afterwards"],
            [list(row) for row in zip(prepared["features"], *columns, strict=True)],
            training_rows=prepared["train_rows"],
            test_rows=prepared["test_rows"],
            global_batch=prepared["batch_size"],
        )


def stratified_split(
    labels: torch.Tensor, classes: list[str], test_ratio: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows for training and rows for the test, each in ascending order, with the same share of every class.

    Args:
        labels: class numbers, (rows,).
        classes: their names.
        test_ratio: share of each class for the test; at least one row goes to either side.
        seed: of the random choice.

    Raises:
        UserError: a class has a single row.
    """
    generator = torch.Generator().manual_seed(seed)
    test = []
    for number, name in enumerate(classes):
        rows = (labels == number).nonzero().flatten()
        if len(rows) < 2:
            raise UserError(f"class {name}: has one row; training and test need one each", code="table-unusable")
        count = min(max(1, round(test_ratio * len(rows))), len(rows) - 1)
        test.append(rows[torch.randperm(len(rows), generator=generator)[:count]])
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    is_test[torch.cat(test)] = True
    return (~is_test).nonzero().flatten(), is_test.nonzero().flatten()


def mean_and_deviation(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each column, (features,) both; a column that is the same in every row has the deviation 1."""
    deviation = features.std(0, unbiased=False)
    return features.mean(0), torch.where(deviation > 0, deviation, 1.0)
