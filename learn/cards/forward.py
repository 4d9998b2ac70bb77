"""Card 6, the first of the training loop: each rank puts its part of the global batch through the model."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F

from learn.cards.base import BaseCard, CardConfig, Preview, Values
from learn.cards.sharding.shard_data import global_batches, rows_of
from learn.cards.storage import Storage

MOST_ROWS = 32  # of a batch that are kept to be looked at


class ForwardConfig(CardConfig):
    """Nothing to set."""


class Forward(BaseCard[ForwardConfig]):
    """Takes the next batch, and computes the loss."""

    card_type = "dist_forward"
    display_name = "Forward"
    description = "Every rank puts its own rows through its model, and computes the mean of their losses."
    look_at = "Other rows on every rank, so another loss on every rank, though the weights are the same."
    category = "distributed"
    execution_mode = "distributed"
    output_view_type = "table"
    config_schema = ForwardConfig
    input_schema: ClassVar = {"sharded_data": "sharded_data", "process_group": "process_group"}
    output_schema: ClassVar = {"forward_output": "forward_output"}

    def execute(self, config: ForwardConfig, inputs: Values, storage: Storage) -> dict[str, Any]:
        """Run the next batch of the epoch; the graph that leads to the loss stays in ``storage.live``."""
        sharded, group, live = inputs["sharded_data"], inputs["process_group"], storage.live
        epoch, batch = divmod(live.setdefault("batches_done", 0), sharded["batches_per_epoch"])
        if "data" not in live:
            data = storage.tensors(sharded["prepared"]["tensors"])
            live["data"] = {name: data[name] for name in ("train_rows", "train_features", "train_labels")}
        if batch == 0:
            live["batches"] = global_batches(sharded["prepared"], epoch)
        everyones = live["batches"][batch]
        own = rows_of(everyones, group["rank"], group["world_size"])
        features, labels = (live["data"][name][own].to(group["device"]) for name in ("train_features", "train_labels"))

        model = live.get("engine", live["model"])
        losses = F.cross_entropy(model(features), labels, reduction="none")
        # Their mean; the last batch of an epoch may leave a rank without a row.
        live["loss"] = losses.sum() / max(1, len(own))

        live["batches_done"] += 1
        live["rows_done"] = live.get("rows_done", 0) + len(own)
        shown = {"row": live["data"]["train_rows"][own], "features": features, "label": labels, "loss": losses}
        storage.save("batch", {name: values[:MOST_ROWS].tolist() for name, values in shown.items()})
        facts = {"epoch": epoch + 1, "batch": batch + 1, "rows": len(own), "share": len(own) / len(everyones)}
        return {"forward_output": facts | {"loss": live["loss"].item()}}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        """Rows and loss of every rank."""
        ranks = [found["forward_output"] for found in storage.of_ranks("outputs")]
        rows = [[rank, found["rows"], round(found["loss"], 4)] for rank, found in enumerate(ranks)]
        return self.preview(["rank", "rows", "loss"], rows, epoch=ranks[0]["epoch"], batch=ranks[0]["batch"])
