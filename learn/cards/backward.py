"""Card 7: each rank computes the gradients of its own loss."""

from __future__ import annotations

from typing import Any, ClassVar

from learn.cards.base import BaseCard, CardConfig, Preview, Values
from learn.cards.held import gradient_norm
from learn.cards.storage import Storage


class BackwardConfig(CardConfig):
    """Nothing to set."""


class Backward(BaseCard[BackwardConfig]):
    """Goes back through the graph of the forward pass."""

    card_type = "dist_backward"
    display_name = "Backward"
    description = "Every rank goes back from its loss to the gradient of every weight; nothing is sent."
    look_at = "The gradients differ from rank to rank, as the rows did: stepping now would drive the models apart."
    category = "distributed"
    execution_mode = "distributed"
    output_view_type = "table"
    config_schema = BackwardConfig
    input_schema: ClassVar = {"forward_output": "forward_output"}
    output_schema: ClassVar = {"gradients": "gradients"}

    def execute(self, config: BackwardConfig, inputs: Values, storage: Storage) -> dict[str, Any]:
        """Fill ``.grad`` of every parameter with this rank's gradient, and let the graph go."""
        live, loss = storage.live, storage.live.pop("loss")
        if "engine" in live:
            live["engine"].backward(loss)
        else:
            loss.backward()
        facts = {name: inputs["forward_output"][name] for name in ("epoch", "batch", "loss", "share")}
        return {"gradients": facts | {"norm": gradient_norm(live["model"])}}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        """The length of every rank's gradient."""
        norms = [found["gradients"]["norm"] for found in storage.of_ranks("outputs")]
        return self.preview(["rank", "gradient norm"], [[rank, round(norm, 6)] for rank, norm in enumerate(norms)])
