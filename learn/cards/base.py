"""What a card is: one step of the pipeline, with a typed configuration, named inputs and outputs, and a preview."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict

from learn.cards.storage import Storage

# By name; each value has the type that its card's schema names, and can be written as JSON: tensors are in the storage,
# and the value says under which key.
Values = Mapping[str, Any]

# How a preview is drawn: its facts above its table; the same, with the sum of the column "parameters" below the table;
# or its facts as large figures.
ViewType = Literal["table", "model_summary", "metrics"]


class CardConfig(BaseModel):
    """A card's settings, none by default; the JSON schema is the form on the page."""

    # YAML reads a column called 4 as a number, and .inf as one too.
    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)


Config = TypeVar("Config", bound=CardConfig)


class Preview(TypedDict):
    """A card's outputs, shown as a few facts and a table; either may be empty."""

    view: ViewType
    summary: dict[str, str | int | float]
    columns: list[str]
    rows: list[list[str | int | float]]


class BaseCard(ABC, Generic[Config]):
    """One step of the pipeline.

    A ``local`` card runs once, in the program's own process. A ``distributed`` one runs on every rank at the same time,
    each in a process of its own, with that rank's inputs and that rank's part of the storage.
    """

    card_type: ClassVar[str]
    display_name: ClassVar[str]
    description: ClassVar[str]  # one sentence: what it does
    look_at: ClassVar[str]  # one sentence: what there is to see before and after it
    category: ClassVar[Literal["data", "sharding", "distributed", "checkpointing", "aggregation", "evaluation"]]
    execution_mode: ClassVar[Literal["local", "distributed"]]
    output_view_type: ClassVar[ViewType]
    config_schema: type[Config]
    input_schema: ClassVar[dict[str, str]]  # name to type; all are needed
    output_schema: ClassVar[dict[str, str]]

    @abstractmethod
    def execute(self, config: Config, inputs: Values, storage: Storage) -> dict[str, Any]:
        """Do the step; returns the outputs that ``output_schema`` names.

        Raises:
            UserError: the configuration does not fit the inputs.
        """

    @abstractmethod
    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        """Show what :meth:`execute` returned. For a distributed card that is rank 0's; the storage has the others'."""

    def metrics(self, outputs: Values) -> dict[str, float]:
        """The figures to follow while the pipeline runs."""
        return {}

    def preview(
        self,
        columns: list[str],
        rows: list[list[str | int | float]],
        /,
        **summary: str | int | float,
    ) -> Preview:
        # Keyword names are shown with spaces for underscores.
        facts = {name.replace("_", " "): value for name, value in summary.items()}
        return {"view": self.output_view_type, "summary": facts, "columns": columns, "rows": rows}
