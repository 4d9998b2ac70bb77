"""Card 4: decide how the model will lie over the ranks, and how large it is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar, Literal

from pydantic import Field

from learn.cards.base import BaseCard, CardConfig, Preview, Values
from learn.cards.model import num_parameters, read_architecture
from learn.cards.storage import Storage

WAYS = {  # a new one is named in the help of --strategy too
    "ddp": "every rank keeps the whole model; gradients are all-reduced",
    "fsdp": "every rank keeps a slice of each tensor; whole ones are gathered while they are needed",
    "deepspeed": "every rank keeps the whole model; DeepSpeed's engine all-reduces the gradients (ZeRO stage 0)",
}


class InitStrategyConfig(CardConfig):
    """What is trained, and how."""

    strategy: Literal["ddp", "fsdp", "deepspeed"] = Field("ddp", description="how the model lies over the ranks")
    model_arch: str = Field("4,16,8,3", description="sizes of the layers: features, hidden ones, classes")
    learning_rate: float = Field(0.01, gt=0, description="of the optimizer")
    optimizer: Literal["adam", "sgd"] = Field("adam", description="Adam, or plain stochastic gradient descent")
    seed: int = Field(0, ge=0, le=2**32, description="of rank 0's weights; every other rank adds its number")


class InitStrategy(BaseCard[InitStrategyConfig]):
    """Checks the architecture against the data."""

    card_type = "dist_init_strategy"
    display_name = "Initialise strategy"
    description = "Decides what is trained and how it lies over the ranks: copied (DDP, DeepSpeed) or sliced (FSDP)."
    look_at = "The parameters of each layer: what the ranks will exchange for every batch."
    category = "distributed"
    execution_mode = "local"
    output_view_type = "model_summary"
    config_schema = InitStrategyConfig
    input_schema: ClassVar = {"prepared_data": "prepared_data"}
    output_schema: ClassVar = {"strategy_config": "strategy_config"}

    def execute(self, config: InitStrategyConfig, inputs: Values, storage: Storage) -> dict[str, Any]:
        """Read the layers' sizes, the first and last of which the data gives."""
        prepared = inputs["prepared_data"]
        layers = read_architecture(config.model_arch, len(prepared["features"]), len(prepared["classes"]))
        return {"strategy_config": config.model_dump(exclude={"model_arch"}) | {"layers": layers}}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        """The layers."""
        strategy = outputs["strategy_config"]
        layers = strategy["layers"]
        rows = [
            [f"linear {number}", inputs, outputs, num_parameters([inputs, outputs])]
            for number, (inputs, outputs) in enumerate(pairwise(layers), start=1)
        ]
        return self.preview(
            ["layer", "inputs", "outputs", "parameters"],
            rows,
            strategy=f"{strategy['strategy']}: {WAYS[strategy['strategy']]}",
            optimizer=strategy["optimizer"],
            learning_rate=strategy["learning_rate"],
        )
