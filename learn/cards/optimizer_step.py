"""Card 9, the last of the training loop: each rank moves its weights."""

from __future__ import annotations

from typing import Any, ClassVar

from learn.cards.base import BaseCard, CardConfig, Preview, Values
from learn.cards.storage import Storage


class OptimizerStepConfig(CardConfig):
    """Nothing to set."""


class OptimizerStep(BaseCard[OptimizerStepConfig]):
    """Steps, and lets go of the gradients."""

    card_type = "dist_optimizer_step"
    display_name = "Optimizer step"
    description = "Every rank moves its weights by the same gradients, and needs to tell nobody; FSDP moves slices."
    look_at = "The weights were equal on all ranks, and after the step are equal again, bit for bit."
    category = "distributed"
    execution_mode = "distributed"
    output_view_type = "table"
    config_schema = OptimizerStepConfig
    input_schema: ClassVar = {"synced_gradients": "synced_gradients"}
    output_schema: ClassVar = {"updated_model": "updated_model"}

    def execute(self, config: OptimizerStepConfig, inputs: Values, storage: Storage) -> dict[str, Any]:
        """Step the optimizer over what this rank keeps of the model."""
        live = storage.live
        stepper = live.get("engine", live["optimizer"])
        stepper.step()
        stepper.zero_grad()
        place = {name: inputs["synced_gradients"][name] for name in ("epoch", "batch")}
        return {"updated_model": place | {"steps": live["batches_done"], "rows": live["rows_done"]}}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        """The checksum of every rank's first weights before and after the step."""
        moments = zip(storage.of_ranks("before"), storage.of_ranks("after"), strict=True)
        rows = [[rank, *(next(iter(held.values()))["checksum"] for held in both)] for rank, both in enumerate(moments)]
        return self.preview(
            ["rank", "first weights before", "after the step"], rows, steps=outputs["updated_model"]["steps"]
        )
