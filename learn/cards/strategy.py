"""Cards 4 and 5: choose how the model is distributed, and form the process group that trains it.

Sources: ZeRO, arXiv 1910.02054; PyTorch FSDP, arXiv 2304.11277.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from common.errors import UserError, first_line
from learn.by_hand.data_parallel import broadcast_parameters
from learn.cards.base import LAID_OUT, BaseCard, CardConfig, Outputs, Preview, Values
from learn.cards.model import build_mlp, num_parameters, read_architecture, record_held
from learn.cards.storage import Storage

STRATEGIES = {  # a new one is named in the help of --strategy too
    "ddp": "every rank keeps the whole model; gradients are all-reduced",
    "fsdp": "every rank keeps a shard of each tensor; whole tensors are gathered while they are needed",
    "deepspeed": "every rank keeps the whole model; DeepSpeed's engine all-reduces the gradients (ZeRO stage 0)",
}


class InitStrategyConfig(CardConfig):
    strategy: Literal["ddp", "fsdp", "deepspeed"] = Field(
        "ddp",
        description="how ranks share the model",
    )
    model_arch: str = Field(
        "4,16,8,3",
        description="sizes of the layers: features, hidden ones, classes",
    )
    learning_rate: float = Field(0.01, gt=0, description="of the optimizer")
    optimizer: Literal["adam", "sgd"] = Field(
        "adam",
        description="Adam, or plain stochastic gradient descent",
    )
    seed: int = Field(
        0,
        ge=0,
        le=2**32,
        description="of rank 0's weights; every other rank adds its rank",
    )


class InitStrategy(BaseCard[InitStrategyConfig]):
    """Card 4: choose strategy, architecture and optimizer; they must fit the data."""

    card_type = "dist_init_strategy"
    display_name = "Initialize strategy"
    description = (
        "Decides what is trained, and whether it is replicated (DDP, DeepSpeed) or sharded (FSDP)."
    )
    look_at = "The parameters of each layer: what the ranks will exchange for every batch."
    category = "distributed"
    execution_mode = "local"
    output_view_type = "model_summary"
    config_schema = InitStrategyConfig
    input_schema: ClassVar = {"prepared_data": "prepared_data"}
    output_schema: ClassVar = {"strategy_config": "strategy_config"}

    def execute(self, config: InitStrategyConfig, inputs: Values, storage: Storage) -> Outputs:
        prepared = inputs["prepared_data"]
        num_features, num_classes = len(prepared["features"]), len(prepared["classes"])
        # Checked here, once and with a message, and not by a matrix product on every rank.
        layers = read_architecture(config.model_arch, num_features, num_classes)
        return {"strategy_config": config.model_dump(exclude={"model_arch"}) | {"layers": layers}}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        strategy = outputs["strategy_config"]
        layers = strategy["layers"]
        rows = [
            [f"linear {number}", inputs, outputs, num_parameters([inputs, outputs])]
            for number, (inputs, outputs) in enumerate(pairwise(layers), start=1)
        ]
        return self.preview(
            ["layer", "inputs", "outputs", "parameters"],
            rows,
            strategy=f"{strategy['strategy']}: {STRATEGIES[strategy['strategy']]}",
            optimizer=strategy["optimizer"],
            learning_rate=strategy["learning_rate"],
        )


TIMEOUT = timedelta(minutes=5)  # for a rank to wait for the others


class SetupProcessGroupConfig(CardConfig):
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto",
        description="gloo between CPUs, nccl between GPUs; auto takes nccl if every rank has a GPU",
    )
    init_method: str = Field(
        "env://",
        pattern="^(env|tcp)://",
        description=(
            "where the ranks meet: env:// (torchrun's variables) or tcp://HOST:PORT of this machine"
        ),
    )


class SetupProcessGroup(BaseCard[SetupProcessGroupConfig]):
    """Card 5: form the process group, build a model per rank, and broadcast rank 0's weights."""

    card_type = "dist_setup_process_group"
    display_name = "Set up process group"
    description = (
        "Joins the processes to a group, builds a model on each, and broadcasts the weights of "
        "rank 0."
    )
    look_at = (
        "Before the broadcast every rank has random weights of its own; after it the checksums "
        "are equal."
    )
    category = "distributed"
    execution_mode = "distributed"
    output_view_type = "table"
    held = (
        "parameters",
        {"before": "before the broadcast", "broadcast": "after the broadcast", "after": LAID_OUT},
    )
    config_schema = SetupProcessGroupConfig
    input_schema: ClassVar = {"strategy_config": "strategy_config", "sharded_data": "sharded_data"}
    output_schema: ClassVar = {"process_group": "process_group"}

    def execute(self, config: SetupProcessGroupConfig, inputs: Values, storage: Storage) -> Outputs:
        rank, world_size = storage.rank, inputs["sharded_data"]["num_workers"]
        backend = choose_backend(config.backend, world_size)
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        join_group(backend, config.init_method, rank, world_size, device)

        strategy = inputs["strategy_config"]
        # Another seed on each rank, so that there is something to see: the broadcast makes the
        # models equal, not the seed.
        model = build_mlp(strategy["layers"], seed=strategy["seed"] + rank).to(device)
        storage.live["model"] = model
        record_held("before", storage)
        broadcast_parameters(model)
        record_held("broadcast", storage)
        # From here on the rank keeps model and optimizer from card to card.
        storage.live |= DISTRIBUTE[strategy["strategy"]](model, strategy, device)
        facts = {"rank": rank, "world_size": world_size}
        return {"process_group": facts | {"backend": backend, "device": str(device)}}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        moments = (storage.of_ranks(moment) for moment in ("before", "broadcast", "after"))
        rows = []
        for rank, (before, broadcast, after) in enumerate(zip(*moments, strict=True)):
            kept = sum(math.prod(held["shape"]) for held in after.values())
            checksums = [next(iter(held.values()))["checksum"] for held in (before, broadcast)]
            rows.append([rank, *checksums, kept])
        group = outputs["process_group"]
        return self.preview(
            ["rank", "first weights before", "after the broadcast", "numbers kept"],
            rows,
            backend=group["backend"],
            world_size=group["world_size"],
        )


def choose_backend(asked: str, world_size: int) -> str:
    """The library that the ranks communicate through: NCCL if each has its own GPU."""
    num_gpus = torch.cuda.device_count()
    if asked == "nccl" and num_gpus < world_size:
        raise UserError(
            f"backend nccl: {world_size} ranks need a GPU each, and there are {num_gpus}; use gloo",
            code="gpus-too-few",
        )
    if asked == "auto":
        return "nccl" if num_gpus >= world_size else "gloo"
    return asked


def join_group(
    backend: str,
    init_method: str,
    rank: int,
    world_size: int,
    device: torch.device,
) -> None:
    """Form the process group; returns when all ranks have joined."""
    # NCCL must know each rank's GPU: without it all ranks of a machine would use the first one.
    bound = device if backend == "nccl" else None
    if bound:
        torch.cuda.set_device(bound)
    if init_method != "env://":
        # Then rank 0 holds the store, not the parent.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
            device_id=bound,
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(
            f"init_method {init_method}: the {world_size} ranks did not meet ({first_line(error)})",
            code="group-not-formed",
        ) from error


# What a rank keeps in storage.live: the model, the optimizer, and DeepSpeed's engine around both.
Live = dict[str, Any]
OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def copy_to_all(model: nn.Sequential, strategy: Mapping[str, Any], device: torch.device) -> Live:
    """Data parallelism: every rank keeps all of the model, and an optimizer for all of it."""
    return {"model": model, "optimizer": build_optimizer(model, strategy)}


def shard(model: nn.Sequential, strategy: Mapping[str, Any], device: torch.device) -> Live:
    """Fully sharded: every rank keeps, and optimizes, a shard of each tensor's first dimension.

    PyTorch's own ``fully_shard``, with the life of a parameter taken apart so that each part can be
    looked at: a layer is gathered for its forward pass, freed, and gathered again for its backward
    pass. Normally ``fully_shard`` would then reduce-scatter the gradients and free them at once;
    here they stay whole until the all-reduce card does that.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Layer by layer, so that only one layer at a time has to be whole.
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # No reduce-scatter in the backward pass, and no freeing after it.
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    # Created last, so that it holds the shards: its moments are sharded with them.
    return {"model": model, "optimizer": build_optimizer(model, strategy)}


def hand_to_deepspeed(
    model: nn.Sequential,
    strategy: Mapping[str, Any],
    device: torch.device,
) -> Live:
    """DeepSpeed's engine at ZeRO stage 0, where every rank keeps all of model and optimizer."""
    # Imported here because it imports the whole trainer.
    from training.parallelism.deepspeed import import_deepspeed
    from training.quiet import quiet_libraries

    quiet_libraries()
    deepspeed = import_deepspeed(device)
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    # The engine requires a batch size, but uses it for nothing here; the number of rows may differ
    # from rank to rank. Without the setting it would clip gradients whose norm is above 1.
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
    settings |= {"zero_optimization": {"stage": 0}}
    optimizer = build_optimizer(model, strategy)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=settings,
        dist_init_required=False,
    )
    # Otherwise its backward pass would already reduce the gradients, which is what the all-reduce
    # card does.
    engine.enable_backward_allreduce = False
    return {"model": model, "optimizer": optimizer, "engine": engine}


def build_optimizer(model: nn.Module, strategy: Mapping[str, Any]) -> torch.optim.Optimizer:
    return OPTIMIZERS[strategy["optimizer"]](model.parameters(), lr=strategy["learning_rate"])


DISTRIBUTE: dict[str, Callable[[nn.Sequential, Mapping[str, Any], torch.device], Live]] = {
    "ddp": copy_to_all,
    "fsdp": shard,
    "deepspeed": hand_to_deepspeed,
}
