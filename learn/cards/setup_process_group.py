"""Card 5: let the processes find each other, and give all of them the same model."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import Field

from common.errors import UserError, first_line
from learn.by_hand.data_parallel import broadcast_parameters
from learn.cards.base import BaseCard, CardConfig, Preview, Values
from learn.cards.distributed.layout import LAY_OUT
from learn.cards.held import record_held
from learn.cards.model import build_mlp
from learn.cards.storage import Storage

TIMEOUT = timedelta(minutes=5)  # that a rank waits for the others


class SetupProcessGroupConfig(CardConfig):
    """How the processes talk."""

    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="gloo between CPUs, nccl between GPUs; auto takes nccl where every rank has a GPU"
    )
    init_method: str = Field(
        "env://",
        pattern="^(env|tcp)://",
        description="where the ranks meet: env:// (torchrun's variables) or tcp://HOST:PORT of this machine",
    )


class SetupProcessGroup(BaseCard[SetupProcessGroupConfig]):
    """Forms the group, makes a model on each rank, and broadcasts that of rank 0."""

    card_type = "dist_setup_process_group"
    display_name = "Set up process group"
    description = "Joins the processes to a group, makes a model on each, and broadcasts the weights of rank 0."
    look_at = "Before the broadcast every rank has random weights of its own; after it the checksums are equal."
    category = "distributed"
    execution_mode = "distributed"
    output_view_type = "table"
    config_schema = SetupProcessGroupConfig
    input_schema: ClassVar = {"strategy_config": "strategy_config", "sharded_data": "sharded_data"}
    output_schema: ClassVar = {"process_group": "process_group"}

    def execute(self, config: SetupProcessGroupConfig, inputs: Values, storage: Storage) -> dict[str, Any]:
        """Form the group; from here on the rank keeps model and optimizer in ``storage.live``."""
        rank, world_size = storage.rank, inputs["sharded_data"]["num_workers"]
        backend = choose_backend(config.backend, world_size)
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        join_group(backend, config.init_method, rank, world_size, device)

        strategy = inputs["strategy_config"]
        model = build_mlp(strategy["layers"], seed=strategy["seed"] + rank).to(device)
        storage.live["model"] = model
        record_held("before", storage)
        broadcast_parameters(model)
        record_held("broadcast", storage)
        storage.live |= LAY_OUT[strategy["strategy"]](model, strategy, device)
        return {"process_group": {"rank": rank, "world_size": world_size, "backend": backend, "device": str(device)}}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        """The checksum of every rank's first weights before and after the broadcast, and how much it then keeps."""
        moments = (storage.of_ranks(moment) for moment in ("before", "broadcast", "after"))
        rows = []
        for rank, (before, broadcast, after) in enumerate(zip(*moments, strict=True)):
            kept = sum(math.prod(held["shape"]) for held in after.values())
            rows.append([rank, *(next(iter(held.values()))["checksum"] for held in (before, broadcast)), kept])
        group = outputs["process_group"]
        return self.preview(
            ["rank", "first weights before", "after the broadcast", "numbers kept"],
            rows,
            backend=group["backend"],
            world_size=group["world_size"],
        )


def choose_backend(asked: str, world_size: int) -> str:
    """The library that the ranks talk through: NCCL where each has a GPU of its own.

    Raises:
        UserError: NCCL is asked for, and there are fewer GPUs than ranks.
    """
    num_gpus = torch.cuda.device_count()
    if asked == "nccl" and num_gpus < world_size:
        raise UserError(
            f"backend nccl: {world_size} ranks need a GPU each, and there are {num_gpus}; take gloo",
            code="gpus-too-few",
        )
    if asked == "auto":
        return "nccl" if num_gpus >= world_size else "gloo"
    return asked


def join_group(backend: str, init_method: str, rank: int, world_size: int, device: torch.device) -> None:
    """Meet the other ranks; returns when all are there.

    Raises:
        UserError: they do not meet.
    """
    bound = device if backend == "nccl" else None
    if bound:
        torch.cuda.set_device(bound)
    if init_method != "env://":
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the store there is rank 0's, not their parent's
    try:
        dist.init_process_group(
            backend, init_method=init_method, rank=rank, world_size=world_size, timeout=TIMEOUT, device_id=bound
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(
            f"init_method {init_method}: the {world_size} ranks did not meet ({first_line(error)})",
            code="group-not-formed",
        ) from error
