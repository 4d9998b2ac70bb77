"""Cards 1 to 3: read a table, split and normalize its rows, and decide which rank gets which."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from common.errors import UserError
from learn.cards.base import BaseCard, CardConfig, Outputs, Preview, Values
from learn.cards.storage import Storage
from learn.cards.tables import Table, is_number, read_table

MAX_CLASSES = 100
MAX_RANKS = 16
PREVIEW_ROWS = 10


class LoadDatasetConfig(CardConfig):
    source_url: str = Field(
        "iris",
        min_length=1,
        description="iris, a CSV file, or, in a pipeline's file, the http(s) or file address of one",
    )
    target_column: str = Field(
        "species",
        description="the column to predict, by its name or its number from 0",
    )


class LoadDataset(BaseCard[LoadDatasetConfig]):
    """Card 1: read a table into two tensors, features and labels."""

    card_type = "dist_load_dataset"
    display_name = "Load dataset"
    description = (
        "Reads a table of numbers, one example per row, and numbers the classes of the column to "
        "predict."
    )
    look_at = (
        "The rows as they are in the file: each feature in its own unit, one class after another."
    )
    category = "data"
    execution_mode = "local"
    output_view_type = "table"
    config_schema = LoadDatasetConfig
    input_schema: ClassVar = {}
    output_schema: ClassVar = {"dataset": "dataset"}

    def execute(self, config: LoadDatasetConfig, inputs: Values, storage: Storage) -> Outputs:
        table = read_table(config.source_url)
        target = _column(config.target_column, table)
        features, classes, labels = split_target(table, target)
        # Features (rows, features) in fp32, labels (rows,) as class numbers.
        tensors = {"features": torch.tensor(features), "labels": torch.tensor(labels)}
        key = storage.save_tensors("dataset", tensors)
        names = [name for number, name in enumerate(table.columns) if number != target]
        facts = {"tensors": key, "rows": len(labels), "features": names, "classes": classes}
        return {"dataset": facts}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        dataset = outputs["dataset"]
        tensors = storage.tensors(dataset["tensors"])
        classes = [dataset["classes"][label] for label in tensors["labels"][:PREVIEW_ROWS].tolist()]
        features = tensors["features"][:PREVIEW_ROWS].double().round(decimals=4).tolist()
        rows = [[*row, name] for row, name in zip(features, classes, strict=True)]
        columns, classes = [*dataset["features"], "class"], ", ".join(dataset["classes"])
        return self.preview(columns, rows, rows=dataset["rows"], classes=classes)


def _column(target: str, table: Table) -> int:
    if len(table.columns) < 2:
        raise UserError(
            f"{table.name}: has only one column; there must be one to predict and one to predict "
            "it from, separated by commas",
            code="table-unusable",
        )
    if target in table.columns:
        return table.columns.index(target)
    if target.isdecimal() and int(target) < len(table.columns):
        return int(target)
    columns = ", ".join(table.columns)
    problem = f"{table.name} has the columns {columns}"
    raise UserError(f"target_column {target!r}: {problem}", code="data-columns")


def split_target(table: Table, target: int) -> tuple[list[list[float]], list[str], list[int]]:
    """A table's features as numbers, the names of its classes, and each row's class.

    Raises:
        UserError: a feature is not a number, a label is empty, or there are too few or too many
            classes.
    """
    names = [row.cells[target].strip() for row in table.rows]
    column = table.columns[target]
    for row, name in zip(table.rows, names, strict=True):
        if not name:
            problem = f"column {column} is empty"
            raise UserError(f"{table.name} line {row.line}: {problem}", code="table-unusable")
    classes = _ordered(set(names))
    # A column of measurements has a different value in almost every row: it is no class.
    if not 2 <= len(classes) <= MAX_CLASSES:
        found = f"{len(classes)} different values in {len(names)} rows of {table.name}"
        raise UserError(
            f"target_column {column}: {found}; a column of 2 to {MAX_CLASSES} classes is needed",
            code="table-unusable",
        )
    numbers = {name: number for number, name in enumerate(classes)}
    features = [table.features(row, target) for row in table.rows]
    return features, classes, [numbers[name] for name in names]


def _ordered(names: set[str]) -> list[str]:
    """Classes in numeric order if all of them are numbers, otherwise in alphabetical order."""
    if all(map(is_number, names)):
        return sorted(names, key=lambda name: (float(name), name))
    return sorted(names)


class PrepareDataConfig(CardConfig):
    test_ratio: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="share of each class that is kept for testing",
    )
    normalize: bool = Field(
        True,
        description="scale every feature to mean 0 and standard deviation 1",
    )
    batch_size: int = Field(
        16,
        ge=1,
        description="rows per global batch, that is, over all ranks together",
    )
    seed: int = Field(
        42,
        ge=0,
        le=2**32,
        description="of the split and of the order of the training rows",
    )


class PrepareData(BaseCard[PrepareDataConfig]):
    """Card 2: split the rows class by class, and normalize with the training rows' mean only."""

    card_type = "dist_prepare_data"
    display_name = "Prepare data"
    description = "Keeps a share of every class for testing, and brings the features to one scale."
    look_at = (
        "Mean and deviation are those of the training rows only: the test rows must not influence "
        "training."
    )
    category = "data"
    execution_mode = "local"
    output_view_type = "table"
    config_schema = PrepareDataConfig
    input_schema: ClassVar = {"dataset": "dataset"}
    output_schema: ClassVar = {"prepared_data": "prepared_data"}

    def execute(self, config: PrepareDataConfig, inputs: Values, storage: Storage) -> Outputs:
        dataset = inputs["dataset"]
        tensors = storage.tensors(dataset["tensors"])
        features, labels = tensors["features"], tensors["labels"]
        train, test = stratified_split(labels, dataset["classes"], config.test_ratio, config.seed)
        mean, deviation = torch.zeros(features.shape[1]), torch.ones(features.shape[1])
        if config.normalize:
            # Of the training rows only, but used for all: with the test rows in the mean, the
            # model would know something of them before it is tested.
            mean, deviation = mean_and_deviation(features[train])
            features = (features - mean) / deviation
        prepared = {"mean": mean, "deviation": deviation}
        for name, rows in (("train", train), ("test", test)):
            prepared |= {f"{name}_rows": rows, f"{name}_features": features[rows]}
            prepared |= {f"{name}_labels": labels[rows]}
        key = storage.save_tensors("prepared", prepared)
        facts = {"tensors": key, "train_rows": len(train), "test_rows": len(test)}
        facts |= {"batch_size": config.batch_size, "seed": config.seed}
        return {"prepared_data": facts | {name: dataset[name] for name in ("features", "classes")}}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
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
    labels: torch.Tensor,
    classes: list[str],
    test_ratio: float,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and test rows, in ascending order, with the same share of every class."""
    generator = torch.Generator().manual_seed(seed)
    test = []
    # Class by class, so that a small class cannot end up in one of the two by chance.
    for number, name in enumerate(classes):
        rows = (labels == number).nonzero().flatten()
        if len(rows) < 2:
            problem = "has only one row; training and test need one each"
            raise UserError(f"class {name}: {problem}", code="table-unusable")
        # At least one row of each class for the test, and at least one for training.
        count = min(max(1, round(test_ratio * len(rows))), len(rows) - 1)
        test.append(rows[torch.randperm(len(rows), generator=generator)[:count]])
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    is_test[torch.cat(test)] = True
    return (~is_test).nonzero().flatten(), is_test.nonzero().flatten()


def mean_and_deviation(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each column, (features,) both; a column that never changes has the deviation 1."""
    deviation = features.std(0, unbiased=False)
    # Not 0, which the features are divided by.
    return features.mean(0), torch.where(deviation > 0, deviation, 1.0)


class ShardDataConfig(CardConfig):
    num_workers: int = Field(
        4,
        ge=1,
        le=MAX_RANKS,
        description="ranks, each a process with its own shard of the rows",
    )


class ShardData(BaseCard[ShardDataConfig]):
    """Card 3: shuffle the training rows and deal them out like cards."""

    card_type = "dist_shard_data"
    display_name = "Shard data"
    description = (
        "Shuffles the training rows again for every epoch, and deals them to the ranks like cards."
    )
    look_at = (
        "Every row goes to exactly one rank: together the ranks see what one process would see."
    )
    category = "sharding"
    execution_mode = "local"
    output_view_type = "table"
    config_schema = ShardDataConfig
    input_schema: ClassVar = {"prepared_data": "prepared_data"}
    output_schema: ClassVar = {"sharded_data": "sharded_data"}

    def execute(self, config: ShardDataConfig, inputs: Values, storage: Storage) -> Outputs:
        prepared, num_workers = inputs["prepared_data"], config.num_workers
        most = min(prepared["batch_size"], prepared["train_rows"])
        # A rank without rows in a full batch would compute nothing and wait for the others.
        if num_workers > most:
            raise UserError(
                f"num_workers {num_workers}: more ranks than rows in a global batch ({most}); "
                "use fewer workers or a larger batch_size",
                code="rows-too-few",
            )
        # The shards of the first epoch are saved to be looked at. For training, each rank computes
        # its own rows in every epoch, from the same seed and without communication.
        data, batches = storage.tensors(prepared["tensors"]), global_batches(prepared, epoch=0)
        shards = {}
        for rank in range(num_workers):
            own = torch.cat([rows_of(batch, rank, num_workers) for batch in batches])
            shards[f"rank_{rank}"] = data["train_rows"][own]
        storage.save_tensors("shards", shards)
        facts = {"num_workers": num_workers, "batches_per_epoch": len(batches)}
        return {"sharded_data": {"prepared": prepared} | facts}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        sharded = outputs["sharded_data"]
        shards = storage.tensors(storage.key("shards"))
        rows = []
        for rank in range(sharded["num_workers"]):
            shard = shards[f"rank_{rank}"]
            rows.append([rank, len(shard), ", ".join(map(str, shard[:8].tolist())) + ", ..."])
        return self.preview(
            ["rank", "rows", "rows of the data set, in the order of the first epoch"],
            rows,
            workers=sharded["num_workers"],
            batches_per_epoch=sharded["batches_per_epoch"],
        )


def global_batches(prepared: Values, epoch: int) -> tuple[torch.Tensor, ...]:
    """The batches of an epoch, each over all ranks, as row numbers of the training rows.

    Their order follows from seed and epoch alone: on any number of ranks the same rows make up the
    same batches.
    """
    # Epoch and seed in one number, as in DistributedSampler: every epoch has its own order.
    generator = torch.Generator().manual_seed(prepared["seed"] + epoch)
    return torch.randperm(prepared["train_rows"], generator=generator).split(prepared["batch_size"])


def rows_of(batch: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """A rank's part of a global batch, a view of it: every ``world_size``-th row, from ``rank`` on.

    torch's DistributedSampler deals rows out like this too, but pads them so that all ranks get as
    many; here one rank may get a row more than another.
    """
    return batch[rank::world_size]
