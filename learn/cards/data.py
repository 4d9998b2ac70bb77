"""Card 1: read a table and tell which of its columns is to be predicted."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field

from common.errors import UserError
from learn.cards.base import BaseCard, CardConfig, Preview, Values
from learn.cards.data.tables import Table, is_number, read_table
from learn.cards.storage import Storage

MOST_CLASSES = 100
PREVIEW_ROWS = 10


class LoadDatasetConfig(CardConfig):
    """Where the rows come from."""

    source_url: str = Field("iris", min_length=1, description="iris, a CSV file, or the http(s) or file address of one")
    target_column: str = Field("species", description="the column to predict, by its name or its number from 0")


class LoadDataset(BaseCard[LoadDatasetConfig]):
    """Reads features and labels into two tensors."""

    card_type = "dist_load_dataset"
    display_name = "Load dataset"
    description = "Reads a table of numbers, one row an example, and numbers the classes of the column to predict."
    look_at = "The rows as they are in the file: features in units of their own, classes one after another."
    category = "data"
    execution_mode = "local"
    output_view_type = "table"
    config_schema = LoadDatasetConfig
    input_schema: ClassVar = {}
    output_schema: ClassVar = {"dataset": "dataset"}

    def execute(self, config: LoadDatasetConfig, inputs: Values, storage: Storage) -> dict[str, Any]:
        """Read the table; features (rows, features) in fp32, labels (rows,) as class numbers."""
        table = read_table(config.source_url)
        target = _column(config.target_column, table)
        features, classes, labels = split_target(table, target)
        key = storage.save_tensors("dataset", {"features": torch.tensor(features), "labels": torch.tensor(labels)})
        names = [name for number, name in enumerate(table.columns) if number != target]
        return {"dataset": {"tensors": key, "rows": len(labels), "features": names, "classes": classes}}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        """The first rows."""
        dataset = outputs["dataset"]
        tensors = storage.tensors(dataset["tensors"])
        classes = [dataset["classes"][label] for label in tensors["labels"][:PREVIEW_ROWS].tolist()]
        features = tensors["features"][:PREVIEW_ROWS].double().round(decimals=4).tolist()
        rows = [[*row, name] for row, name in zip(features, classes, strict=True)]
        return self.preview(
            [*dataset["features"], "class"], rows, rows=dataset["rows"], classes=", ".join(dataset["classes"])
        )


def _column(target: str, table: Table) -> int:
    if len(table.columns) < 2:
        raise UserError(
            f"{table.name}: has one column; there must be one to predict and one to predict it from, "
            "with commas between",
            code="table-unusable",
        )
    if target in table.columns:
        return table.columns.index(target)
    if target.isdecimal() and int(target) < len(table.columns):
        return int(target)
    raise UserError(
        f"target_column {target!r}: {table.name} has the columns {', '.join(table.columns)}", code="data-columns"
    )


def split_target(table: Table, target: int) -> tuple[list[list[float]], list[str], list[int]]:
    """A table's features as numbers, the names of its classes, and each row's class.

    Raises:
        UserError: a feature is no number, a label is empty, or there are too few or too many classes.
    """
    names = [row.cells[target].strip() for row in table.rows]
    for row, name in zip(table.rows, names, strict=True):
        if not name:
            raise UserError(
                f"{table.name} line {row.line}: column {table.columns[target]} is empty", code="table-unusable"
            )
    classes = _ordered(set(names))
    if not 2 <= len(classes) <= MOST_CLASSES:
        raise UserError(
            f"target_column {table.columns[target]}: {len(classes)} different values in {len(names)} rows of "
            f"{table.name}; a column of 2 to {MOST_CLASSES} classes is needed",
            code="table-unusable",
        )
    numbers = {name: number for number, name in enumerate(classes)}
    return [table.features(row, target) for row in table.rows], classes, [numbers[name] for name in names]


def _ordered(names: set[str]) -> list[str]:
    """Classes in the order of numbers where all of them are numbers, else of letters."""
    return sorted(names, key=lambda name: (float(name), name)) if all(map(is_number, names)) else sorted(names)
