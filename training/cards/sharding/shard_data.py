"""Card 3: say which rank trains on which rows."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from pydantic import Field

from training.cards.base import BaseCard, CardConfig, Preview, Values
from training.cards.storage import Storage
from training.errors import UserError

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
                "take fewer workers or a larger batch_size"
            )
        sharded = {"prepared": prepared, "num_workers": config.num_workers}
        sharded["batches_per_epoch"] = math.ceil(rows / batch_size)
        global_rows = storage.tensors(prepared["tensors"])["train_rows"]
        batches = [global_rows[global_batch(sharded, 0, batch)] for batch in range(sharded["batches_per_epoch"])]
        shards = [
            torch.cat([batch[rank :: config.num_workers] for batch in batches]).tolist()
            for rank in range(config.num_workers)
        ]
        storage.save("shards", shards)
        return {"sharded_data": sharded}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        """The first rows of every rank's shard."""
        sharded = outputs["sharded_data"]
        shards = storage.load(storage.key("shards")) or []
        rows = [[rank, len(shard), ", ".join(map(str, shard[:8])) + ", ..."] for rank, shard in enumerate(shards)]
        return self.preview(
            ["rank", "rows", "rows of the data set, in the order of the first epoch"],
            rows,
            workers=sharded["num_workers"],
            batches_per_epoch=sharded["batches_per_epoch"],
        )


def global_batch(sharded: Values, epoch: int, batch: int) -> torch.Tensor:
    """The rows of a batch over all ranks, as row numbers of the training rows; rank r takes every N-th, from r on.

    The order of an epoch follows from seed and epoch alone, and a global batch is a run of it: on any number of ranks
    the same rows make up the same batches. torch's DistributedSampler deals rows out like this too, but pads them so
    that all ranks get as many; here the last batch may give one rank a row more than another.

    Args:
        sharded: what this card puts out.
        epoch: from 0.
        batch: of the epoch, from 0.
    """
    prepared = sharded["prepared"]
    generator = torch.Generator().manual_seed(prepared["seed"] + epoch)
    order = torch.randperm(prepared["train_rows"], generator=generator)
    start = batch * prepared["batch_size"]
    return order[start : start + prepared["batch_size"]]
