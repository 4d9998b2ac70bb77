"""What a card is: one step of the pipeline, with typed settings, inputs, outputs and a preview."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict
from typing_extensions import TypedDict  # pydantic checks no other before Python 3.12

from common.errors import UserError
from learn.cards.storage import Storage

# By name; each value has the type that its card's schema names, and can be written as JSON: tensors
# are in the storage, and the value says under which key.
Values = Mapping[str, Any]
Outputs = dict[str, Any]

# How a preview is drawn: its facts above its table; the same, with the sum of the column
# "parameters" below the table; or its facts as large figures.
ViewType = Literal["table", "model_summary", "metrics"]


Category = Literal[
    "data",
    "sharding",
    "distributed",
    "checkpointing",
    "aggregation",
    "evaluation",
    "own",
]

# What of the model the page draws for a card, and at which moments, with their titles: "before" and
# "after" the card.
LAID_OUT = "laid out"  # a title; that moment is left out if it equals the one before it
Held = tuple[Literal["parameters", "gradients"], dict[str, str]]


class CardConfig(BaseModel):
    """A card's settings, none by default; the JSON schema is the form on the page."""

    # YAML reads a column called 4 as a number, and .inf as one too. Frozen, because all ranks and
    # the page share one configuration.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )


Config = TypeVar("Config", bound=CardConfig)


class Preview(TypedDict):
    """A card's outputs, shown as a few facts and a table; either may be empty."""

    view: ViewType
    summary: dict[str, str | int | float]
    columns: list[str]
    rows: list[list[str | int | float]]


class BaseCard(ABC, Generic[Config]):
    """One step of the pipeline.

    A ``local`` card runs once, in the program's own process. A ``distributed`` one runs on every
    rank at the same time, each in a process of its own, with that rank's inputs and that rank's
    part of the storage.
    """

    card_type: str  # by which a pipeline names it; of a card of your own, its import path
    display_name: ClassVar[str]
    description: ClassVar[str] = ""  # one sentence: what it does
    look_at: ClassVar[str] = ""  # one sentence: what there is to see before and after it
    category: ClassVar[Category] = "own"
    execution_mode: ClassVar[Literal["local", "distributed"]]
    in_training_loop: ClassVar[bool] = False  # runs for every global batch of every epoch
    output_view_type: ClassVar[ViewType] = "table"
    held: ClassVar[Held | None] = None
    config_schema: type[Config] = CardConfig
    input_schema: ClassVar[dict[str, str]] = {}  # name to type; all are needed
    output_schema: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # A card that derives from another one has its own name, not that of its parent.
        cls.display_name = cls.__dict__.get("display_name", cls.__name__)

    @abstractmethod
    def execute(self, config: Config, inputs: Values, storage: Storage) -> dict[str, Any]:
        """Do the step; returns the outputs that ``output_schema`` names.

        Raises:
            UserError: the configuration does not fit the inputs.
        """

    def run(self, config: Config, inputs: Values, storage: Storage) -> dict[str, Any]:
        """Execute the card, and check that it returned what it promises."""
        outputs = self.execute(config, inputs, storage)
        # Of the twelve this is certain. Of a card of the user's own it is not, and the error would
        # otherwise come from another card, which misses an input.
        is_dict = isinstance(outputs, dict)
        if not is_dict or outputs.keys() != self.output_schema.keys():
            found = ", ".join(map(str, outputs)) if is_dict else type(outputs).__name__
            promised = ", ".join(self.output_schema) or "nothing"
            must = f"execute must return a dictionary of its outputs ({promised})"
            raise UserError(f"card {self.card_type}: {must}, got: {found}", code="own-code")
        return outputs

    @abstractmethod
    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        """Show what :meth:`execute` returned.

        For a distributed card that is rank 0's; the storage has the others'.
        """

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
