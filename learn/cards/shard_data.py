"""Card 3: say which rank trains on which rows."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field

from common.errors import UserError
from learn.cards.base import BaseCard, CardConfig, Preview, Values
from learn.cards.storage import Storage

MOST_WORKERS = 16


class ShardDataConfig(CardConfig):
    """How many ranks there are."""

    num_workers: int = Field(4, ge=1, le=MOST_WORKERS, description="ranks, each a process with a shard of its own")


class ShardData(BaseCard[ShardDataConfig]):
    """Shuffles the training rows and deals them out like cards."""

    card_type = "dist_shard_data"
    display_name = "Shard data"
    description = "Shuffles the training rows anew for every epoch, and deals them out to the ranks like cards."
    look_at = "No row goes to two ranks, and none to nobody: together the ranks see what one process would see."
    category = "sharding"
    execution_mode = "local"
    output_view_type = "table"
    config_schema = ShardDataConfig
    input_schema: ClassVar = {"prepared_data": "prepared_data"}
    output_schema: ClassVar = {"sharded_data": "sharded_data"}

    def execute(self, config: ShardDataConfig, inputs: Values, storage: Storage) -> dict[str, Any]:
        """Count the batches, and write down whose the rows of the first epoch are."""
        prepared = inputs["prepared_data"]
        rows, batch_size = prepared["train_rows"], prepared["batch_size"]
        if config.num_workers > min(batch_size, rows):
            raise UserError(
                f"num_workers {config.num_workers}: more ranks than rows in a global batch ({min(batch_size, rows)}); "
                "take fewer workers or a larger batch_size",
                code="rows-too-few",
            )
        data, batches = storage.tensors(prepared["tensors"]), global_batches(prepared, epoch=0)
        shards = {}
        for rank in range(config.num_workers):
            own = torch.cat([rows_of(batch, rank, config.num_workers) for batch in batches])
            shards[f"rank_{rank}"] = data["train_rows"][own]
        storage.save_tensors("shards", shards)
        sharded = {"prepared": prepared, "num_workers": config.num_workers, "batches_per_epoch": len(batches)}
        return {"sharded_data": sharded}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        """The first rows of every rank's shard."""
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

    Their order follows from seed and epoch alone: on any number of ranks the same rows make up the same batches.

    Args:
        prepared: what card 2 puts out.
        epoch: from 0.
    """
    generator = torch.Generator().manual_seed(prepared["seed"] + epoch)
    return torch.randperm(prepared["train_rows"], generator=generator).split(prepared["batch_size"])


def rows_of(batch: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """A rank's part of a global batch, a view of it: every ``world_size``-th row, from ``rank`` on.

    torch's DistributedSampler deals rows out like this too, but pads them so that all ranks get as many; here one rank
    may get a row more than another.
    """
    return batch[rank::world_size]
