"""Card 8: the ranks exchange their gradients, so that each has the one of the whole global batch.

Sources: Li et al., "PyTorch Distributed", arXiv 2006.15704; for the sharded one ZeRO, arXiv 1910.02054, section 5, and
PyTorch FSDP, arXiv 2304.11277.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from learn.cards.base import BaseCard, CardConfig, Preview, Values
from learn.cards.held import gradient_norm
from learn.cards.storage import Storage

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class AllReduceConfig(CardConfig):
    """Nothing to set."""


class AllReduce(BaseCard[AllReduceConfig]):
    """Averages the gradients over the ranks, each weighted by its share of the rows."""

    card_type = "dist_allreduce"
    display_name = "All-reduce gradients"
    description = "The ranks average their gradients; under FSDP each keeps its slice of the average only."
    look_at = "Different on every rank before, and equal after: the gradient that one process would have found."
    category = "distributed"
    execution_mode = "distributed"
    output_view_type = "table"
    config_schema = AllReduceConfig
    input_schema: ClassVar = {"gradients": "gradients"}
    output_schema: ClassVar = {"synced_gradients": "synced_gradients"}

    def execute(self, config: AllReduceConfig, inputs: Values, storage: Storage) -> dict[str, Any]:
        """Average the gradients in place, and the loss beside them."""
        live, gradients = storage.live, inputs["gradients"]
        if "engine" in live:
            let_engine_all_reduce(live["engine"], gradients["share"])
        elif isinstance(live["model"], FSDPModule):
            reduce_scatter_gradients(live["model"], gradients["share"])
        else:
            all_reduce_gradients(live["model"], gradients["share"])
        loss = torch.tensor(gradients["loss"] * gradients["share"], device=next(live["model"].parameters()).device)
        dist.all_reduce(loss)
        norms = {"local_norm": gradients["norm"], "norm": gradient_norm(live["model"])}
        place = {name: gradients[name] for name in ("epoch", "batch")}
        return {"synced_gradients": place | norms | {"loss": loss.item()}}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        """The length of every rank's gradient before and after, and the checksum of its first one."""
        ranks = zip(storage.of_ranks("outputs"), storage.of_ranks("after"), strict=True)
        rows = []
        for rank, (found, held) in enumerate(ranks):
            norms = (round(found["synced_gradients"][name], 6) for name in ("local_norm", "norm"))
            first = next(held[name]["checksum"] for name in held if name.startswith("gradients/"))
            rows.append([rank, *norms, first])
        loss = round(outputs["synced_gradients"]["loss"], 4)
        return self.preview(["rank", "norm before", "norm after", "first gradients"], rows, loss_of_the_batch=loss)

    def metrics(self, outputs: Values) -> dict[str, float]:
        """The mean loss of the global batch."""
        return {"loss": outputs["synced_gradients"]["loss"]}


def all_reduce_gradients(model: nn.Module, share: float) -> None:
    """Average each gradient over the ranks, in place.

    Args:
        model: the same on every rank, with the gradients of the mean loss of the rank's own rows.
        share: those rows as a part of the global batch's, 1 / N where all ranks have as many.
    """
    gradients = [parameter.grad for parameter in model.parameters()]
    # All in one bucket, as DDP does with several MB at a time: a collective costs its ranks' waiting for each other.
    bucket = torch.cat([gradient.flatten() for gradient in gradients]) * share
    dist.all_reduce(bucket, op=dist.ReduceOp.SUM)
    means = bucket.split([gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def let_engine_all_reduce(engine: DeepSpeedEngine, share: float) -> None:
    """Average each gradient over the ranks by DeepSpeed, which counts all ranks alike.

    Args:
        engine: around the same model on every rank, with the gradients of the mean loss of the rank's own rows.
        share: those rows as a part of the global batch's.
    """
    for parameter in engine.module.parameters():
        parameter.grad *= share * dist.get_world_size()
    engine.allreduce_gradients()


def reduce_scatter_gradients(model: nn.Module, share: float) -> None:
    """Average each gradient over the ranks, and leave on each rank the slice that goes with its slice of the weights.

    Args:
        model: fully sharded, its layers gathered, with whole gradients of the mean loss of the rank's own rows.
        share: those rows as a part of the global batch's.
    """
    whole = {}
    for name, parameter in model.named_parameters():
        whole[name], parameter.grad = parameter.grad * share, None
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # frees the gathered weights; from here on parameters are slices
    for name, parameter in model.named_parameters():
        # Every rank holds a summand of the gradient. To get from there to slices of the sum is a reduce-scatter.
        summand = DTensor.from_local(whole[name], parameter.device_mesh, [Partial("sum")])
        parameter.grad = summand.redistribute(placements=parameter.placements)
