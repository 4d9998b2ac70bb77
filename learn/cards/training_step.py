"""Cards 6 to 9, the training loop: forward, backward, all-reduce of the gradients, optimizer step.

Sources: Li et al., "PyTorch Distributed", arXiv 2006.15704; for the sharded all-reduce ZeRO, arXiv
1910.02054, section 5, and PyTorch FSDP, arXiv 2304.11277.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from learn.cards.base import BaseCard, CardConfig, Outputs, Preview, Values
from learn.cards.data import global_batches, rows_of
from learn.cards.model import gradient_norm
from learn.cards.storage import Storage

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MAX_ROWS = 32  # of a batch that are saved for the page


class Forward(BaseCard[CardConfig]):
    """Card 6: take the next batch, and compute the loss."""

    card_type = "dist_forward"
    display_name = "Forward"
    description = (
        "Every rank runs its own rows through its model, and computes the mean of their losses."
    )
    look_at = (
        "Different rows on every rank, so a different loss on every rank, although the weights "
        "are the same."
    )
    category = "distributed"
    execution_mode = "distributed"
    in_training_loop = True
    output_view_type = "table"
    config_schema = CardConfig
    input_schema: ClassVar = {"sharded_data": "sharded_data", "process_group": "process_group"}
    output_schema: ClassVar = {"forward_output": "forward_output"}

    def execute(self, config: CardConfig, inputs: Values, storage: Storage) -> Outputs:
        sharded, group, live = inputs["sharded_data"], inputs["process_group"], storage.live
        epoch, batch = divmod(live.setdefault("batches_done", 0), sharded["batches_per_epoch"])
        # Every rank reads all training rows once, and takes its part of each batch from them.
        if "data" not in live:
            saved = storage.tensors(sharded["prepared"]["tensors"])
            names = ("train_rows", "train_features", "train_labels")
            live["data"] = {name: saved[name] for name in names}
        data = live["data"]
        # The same order on every rank, because the seed is the same: nothing has to be sent.
        if batch == 0:
            live["batches"] = global_batches(sharded["prepared"], epoch)
        global_batch = live["batches"][batch]
        own = rows_of(global_batch, group["rank"], group["world_size"])
        features = data["train_features"][own].to(group["device"])  # (own rows, features)
        labels = data["train_labels"][own].to(group["device"])  # (own rows,)

        model = live.get("engine", live["model"])
        losses = F.cross_entropy(model(features), labels, reduction="none")
        # The mean, not NaN if this rank has no row, which can happen in the last batch of an epoch.
        # The graph behind it stays in storage.live for the backward card.
        live["loss"] = losses.sum() / max(1, len(own))

        live["batches_done"] += 1
        live["rows_done"] = live.get("rows_done", 0) + len(own)
        shown = {"row": data["train_rows"][own], "features": features}
        shown |= {"label": labels, "loss": losses}
        storage.save("batch", {name: values[:MAX_ROWS].tolist() for name, values in shown.items()})
        # The share of the global batch is this rank's weight in the all-reduce: 1 / N, unless N
        # does not divide the batch.
        facts = {"epoch": epoch + 1, "batch": batch + 1, "rows": len(own)}
        facts |= {"share": len(own) / len(global_batch), "loss": live["loss"].item()}
        return {"forward_output": facts}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        ranks = [found["forward_output"] for found in storage.of_ranks("outputs")]
        rows = [[rank, found["rows"], round(found["loss"], 4)] for rank, found in enumerate(ranks)]
        epoch, batch = ranks[0]["epoch"], ranks[0]["batch"]
        return self.preview(["rank", "rows", "loss"], rows, epoch=epoch, batch=batch)


class Backward(BaseCard[CardConfig]):
    """Card 7: go back through the forward pass, and fill ``.grad`` with this rank's gradients."""

    card_type = "dist_backward"
    display_name = "Backward"
    description = (
        "Every rank computes the gradient of every weight from its own loss, without communication."
    )
    look_at = (
        "The gradients differ from rank to rank, as the rows did: a step now would make the "
        "models diverge."
    )
    category = "distributed"
    execution_mode = "distributed"
    in_training_loop = True
    output_view_type = "table"
    held = ("gradients", {"after": "after the backward pass"})
    config_schema = CardConfig
    input_schema: ClassVar = {"forward_output": "forward_output"}
    output_schema: ClassVar = {"gradients": "gradients"}

    def execute(self, config: CardConfig, inputs: Values, storage: Storage) -> Outputs:
        live, loss = storage.live, storage.live.pop("loss")
        # No collective here. DDP and FSDP would reduce gradients while this runs, which saves time
        # and shows nothing: the next card does it afterwards.
        if "engine" in live:
            live["engine"].backward(loss)
        else:
            loss.backward()
        names = ("epoch", "batch", "loss", "share")
        facts = {name: inputs["forward_output"][name] for name in names}
        return {"gradients": facts | {"norm": gradient_norm(live["model"])}}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        norms = [found["gradients"]["norm"] for found in storage.of_ranks("outputs")]
        rows = [[rank, round(norm, 6)] for rank, norm in enumerate(norms)]
        return self.preview(["rank", "gradient norm"], rows)


class AllReduce(BaseCard[CardConfig]):
    """Card 8: average the gradients over the ranks, each weighted by its share of the rows."""

    card_type = "dist_allreduce"
    display_name = "All-reduce gradients"
    description = (
        "The ranks average their gradients; under FSDP each keeps only its shard of the average."
    )
    look_at = (
        "Different on every rank before, and equal after: the gradient that one process would "
        "have computed."
    )
    category = "distributed"
    execution_mode = "distributed"
    in_training_loop = True
    output_view_type = "table"
    held = ("gradients", {"before": "before the all-reduce", "after": "after the all-reduce"})
    config_schema = CardConfig
    input_schema: ClassVar = {"gradients": "gradients"}
    output_schema: ClassVar = {"synced_gradients": "synced_gradients"}

    def execute(self, config: CardConfig, inputs: Values, storage: Storage) -> Outputs:
        live, gradients = storage.live, inputs["gradients"]
        model, share = live["model"], gradients["share"]
        if "engine" in live:
            all_reduce_with_deepspeed(live["engine"], share)
        elif isinstance(model, FSDPModule):
            reduce_scatter_gradients(model, share)
        else:
            all_reduce_gradients(model, share)
        # The loss of the global batch: the ranks' means, weighted like their gradients.
        device = next(model.parameters()).device
        loss = torch.tensor(gradients["loss"] * share, device=device)
        dist.all_reduce(loss)
        norms = {"local_norm": gradients["norm"], "norm": gradient_norm(live["model"])}
        place = {name: gradients[name] for name in ("epoch", "batch")}
        return {"synced_gradients": place | norms | {"loss": loss.item()}}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        ranks = zip(storage.of_ranks("outputs"), storage.of_ranks("after"), strict=True)
        rows = []
        for rank, (found, held) in enumerate(ranks):
            norms = (round(found["synced_gradients"][name], 6) for name in ("local_norm", "norm"))
            first = next(held[name]["checksum"] for name in held if name.startswith("gradients/"))
            rows.append([rank, *norms, first])
        loss = round(outputs["synced_gradients"]["loss"], 4)
        columns = ["rank", "norm before", "norm after", "first gradients"]
        return self.preview(columns, rows, loss_of_the_batch=loss)

    def metrics(self, outputs: Values) -> dict[str, float]:
        return {"loss": outputs["synced_gradients"]["loss"]}


def all_reduce_gradients(model: nn.Module, share: float) -> None:
    """Average each gradient over the ranks, in place.

    ``share``: this rank's rows as a part of the global batch, 1 / N if all N ranks have the same
    number.
    """
    gradients = [parameter.grad for parameter in model.parameters()]
    # All gradients in one bucket (DDP uses buckets of 25 MB): every collective makes the ranks wait
    # for each other, so one call for all of them is cheaper than one per tensor.
    bucket = torch.cat([gradient.flatten() for gradient in gradients]) * share
    # Shares add up to 1, so the sum is a mean, in which every row has the same weight.
    dist.all_reduce(bucket, op=dist.ReduceOp.SUM)
    means = bucket.split([gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def all_reduce_with_deepspeed(engine: DeepSpeedEngine, share: float) -> None:
    """Average each gradient with DeepSpeed, which gives all ranks the same weight."""
    # It divides the sum by the number of ranks, so each gradient is multiplied by that before: what
    # is left is the weight, the share.
    for parameter in engine.module.parameters():
        parameter.grad *= share * dist.get_world_size()
    engine.allreduce_gradients()


def reduce_scatter_gradients(model: nn.Module, share: float) -> None:
    """Average each gradient; each rank keeps the slice that matches its slice of the weights."""
    whole = {}
    for name, parameter in model.named_parameters():
        # Taken from the parameter, which is about to be a shard and cannot have a whole gradient.
        whole[name], parameter.grad = parameter.grad * share, None
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # frees the gathered weights; from here on parameters are shards
    for name, parameter in model.named_parameters():
        # Every rank holds one summand of the gradient, which is what Partial("sum") declares. Going
        # from summands to shards of their sum is a reduce-scatter.
        summand = DTensor.from_local(whole[name], parameter.device_mesh, [Partial("sum")])
        parameter.grad = summand.redistribute(placements=parameter.placements)


class OptimizerStep(BaseCard[CardConfig]):
    """Card 9, the last of the loop: each rank updates its weights, and frees the gradients."""

    card_type = "dist_optimizer_step"
    display_name = "Optimizer step"
    description = (
        "Every rank updates its weights with the same gradients, without communication; FSDP "
        "updates shards."
    )
    look_at = (
        "The weights were equal on all ranks, and after the step are equal again, bit for bit."
    )
    category = "distributed"
    execution_mode = "distributed"
    in_training_loop = True
    output_view_type = "table"
    held = ("parameters", {"before": "before the step", "after": "after the step"})
    config_schema = CardConfig
    input_schema: ClassVar = {"synced_gradients": "synced_gradients"}
    output_schema: ClassVar = {"updated_model": "updated_model"}

    def execute(self, config: CardConfig, inputs: Values, storage: Storage) -> Outputs:
        live = storage.live
        # Every rank steps on its own. The weights stay equal because the gradients are, and because
        # Adam's moments are made of equal gradients too. Under FSDP each rank steps its shards.
        stepper = live.get("engine", live["optimizer"])
        stepper.step()
        stepper.zero_grad()
        place = {name: inputs["synced_gradients"][name] for name in ("epoch", "batch")}
        return {"updated_model": place | {"steps": live["batches_done"], "rows": live["rows_done"]}}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        moments = zip(storage.of_ranks("before"), storage.of_ranks("after"), strict=True)
        rows = []
        for rank, both in enumerate(moments):
            rows.append([rank, *(next(iter(held.values()))["checksum"] for held in both)])
        columns = ["rank", "first weights before", "after the step"]
        return self.preview(columns, rows, steps=outputs["updated_model"]["steps"])
