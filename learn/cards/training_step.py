"""Cards 6 to 9, the training loop: forward, backward, all-reduce of the gradients, optimizer step.

Sources: Li et al., "PyTorch Distributed", arXiv 2006.15704; for the sharded all-reduce ZeRO, arXiv 1910.02054, section
5, and PyTorch FSDP, arXiv 2304.11277.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from learn.cards.base import BaseCard, CardConfig, Preview, Values
from learn.cards.data import global_batches, rows_of
from learn.cards.model import gradient_norm
from learn.cards.storage import Storage

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MOST_ROWS = 32  # of a batch that are kept to be looked at


class Forward(BaseCard[CardConfig]):
    """Takes the next batch, and computes the loss."""

    card_type = "dist_forward"
    display_name = "Forward"
    description = "Every rank puts its own rows through its model, and computes the mean of their losses."
    look_at = "Other rows on every rank, so another loss on every rank, though the weights are the same."
    category = "distributed"
    execution_mode = "distributed"
    output_view_type = "table"
    config_schema = CardConfig
    input_schema: ClassVar = {"sharded_data": "sharded_data", "process_group": "process_group"}
    output_schema: ClassVar = {"forward_output": "forward_output"}

    def execute(self, config: CardConfig, inputs: Values, storage: Storage) -> dict[str, Any]:
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


class Backward(BaseCard[CardConfig]):
    """Goes back through the graph of the forward pass."""

    card_type = "dist_backward"
    display_name = "Backward"
    description = "Every rank goes back from its loss to the gradient of every weight; nothing is sent."
    look_at = "The gradients differ from rank to rank, as the rows did: stepping now would drive the models apart."
    category = "distributed"
    execution_mode = "distributed"
    output_view_type = "table"
    config_schema = CardConfig
    input_schema: ClassVar = {"forward_output": "forward_output"}
    output_schema: ClassVar = {"gradients": "gradients"}

    def execute(self, config: CardConfig, inputs: Values, storage: Storage) -> dict[str, Any]:
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


class AllReduce(BaseCard[CardConfig]):
    """Averages the gradients over the ranks, each weighted by its share of the rows."""

    card_type = "dist_allreduce"
    display_name = "All-reduce gradients"
    description = "The ranks average their gradients; under FSDP each keeps its slice of the average only."
    look_at = "Different on every rank before, and equal after: the gradient that one process would have found."
    category = "distributed"
    execution_mode = "distributed"
    output_view_type = "table"
    config_schema = CardConfig
    input_schema: ClassVar = {"gradients": "gradients"}
    output_schema: ClassVar = {"synced_gradients": "synced_gradients"}

    def execute(self, config: CardConfig, inputs: Values, storage: Storage) -> dict[str, Any]:
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


class OptimizerStep(BaseCard[CardConfig]):
    """Steps, and lets go of the gradients."""

    card_type = "dist_optimizer_step"
    display_name = "Optimizer step"
    description = "Every rank moves its weights by the same gradients, and needs to tell nobody; FSDP moves slices."
    look_at = "The weights were equal on all ranks, and after the step are equal again, bit for bit."
    category = "distributed"
    execution_mode = "distributed"
    output_view_type = "table"
    config_schema = CardConfig
    input_schema: ClassVar = {"synced_gradients": "synced_gradients"}
    output_schema: ClassVar = {"updated_model": "updated_model"}

    def execute(self, config: CardConfig, inputs: Values, storage: Storage) -> dict[str, Any]:
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
