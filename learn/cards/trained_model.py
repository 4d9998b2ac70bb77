"""Cards 10 to 12: save what each rank holds, make one model of it, and test that model."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import Field
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from learn.cards.base import BaseCard, CardConfig, Outputs, Preview, Values
from learn.cards.model import build_mlp, describe, layer_sizes, own_part
from learn.cards.storage import Storage


class SaveCheckpointConfig(CardConfig):
    epoch: int = Field(
        30,
        ge=1,
        le=10_000,
        description="the epoch that is saved, which is where training ends",
    )
    save_all_ranks: bool = Field(
        True,
        description="every rank saves its part; otherwise rank 0 saves the whole model",
    )


class SaveCheckpoint(BaseCard[SaveCheckpointConfig]):
    """Card 10: write the weights as safetensors, and the architecture as JSON next to them."""

    card_type = "dist_save_checkpoint"
    display_name = "Save checkpoint"
    description = (
        "Every rank writes its part of the model, or rank 0 writes all of it, together with the "
        "architecture."
    )
    look_at = "Under DDP every file holds the same model; under FSDP each holds a shard of it."
    category = "checkpointing"
    execution_mode = "distributed"
    output_view_type = "table"
    config_schema = SaveCheckpointConfig
    input_schema: ClassVar = {"updated_model": "updated_model"}
    output_schema: ClassVar = {"checkpoint": "checkpoint"}

    def execute(self, config: SaveCheckpointConfig, inputs: Values, storage: Storage) -> Outputs:
        model = storage.live["model"]
        sharded = isinstance(model, FSDPModule) and config.save_all_ranks
        # On every rank, even if only rank 0 saves: gathering shards is a collective.
        weights = own_weights(model) if config.save_all_ranks else whole_weights(model)
        facts = {
            "layers": layer_sizes(model),
            "sharded": sharded,
            "shapes": {name: list(parameter.shape) for name, parameter in model.named_parameters()},
            **inputs["updated_model"],
        }
        if config.save_all_ranks or storage.rank == 0:
            storage.save_tensors("model", weights)
            storage.save("model", facts)
        key = storage.key("model", None if config.save_all_ranks else 0)
        return {"checkpoint": {"model": key} | facts}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        checkpoint = outputs["checkpoint"]
        # As on the other cards; a file has the names sorted.
        first = next(iter(checkpoint["shapes"]))
        rows = []
        ranks = storage.of_ranks("outputs")
        for key in dict.fromkeys(found["checkpoint"]["model"] for found in ranks):
            weights = storage.tensors(key)
            count = sum(tensor.numel() for tensor in weights.values())
            rows.append([f"{key}.safetensors", count, describe(weights[first])["checksum"]])
        layers, columns = checkpoint["layers"], ["file", "numbers", "first weights"]
        shown = ",".join(map(str, layers))
        return self.preview(columns, rows, epoch=checkpoint["epoch"], layers=shown)


def own_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part: the model, or its shard of every tensor."""
    return {name: own_part(parameter) for name, parameter in model.named_parameters()}


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole model; if it is sharded this is an all-gather, which all ranks must call."""
    if not isinstance(model, FSDPModule):
        return own_weights(model)
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


class AggregateModelConfig(CardConfig):
    method: Literal["average", "weighted"] = Field(
        "average",
        description=(
            "every rank's model has the same weight, or a weight by the rows that it was trained on"
        ),
    )


class AggregateModel(BaseCard[AggregateModelConfig]):
    """Card 11: average the ranks' models, or put the shards of one model together."""

    card_type = "dist_aggregate_model"
    display_name = "Aggregate model"
    description = (
        "Gathers the shards of an FSDP model. DDP does not need this step, because all its "
        "replicas are equal; here "
        "they are averaged, to show that the average is the same model."
    )
    look_at = (
        "Under DDP the ranks' checksums are equal, so each replica is the model; averaging only "
        "adds rounding."
    )
    category = "aggregation"
    execution_mode = "distributed"
    output_view_type = "model_summary"
    config_schema = AggregateModelConfig
    input_schema: ClassVar = {"checkpoint": "checkpoint"}
    output_schema: ClassVar = {"aggregated_model": "aggregated_model"}

    def execute(self, config: AggregateModelConfig, inputs: Values, storage: Storage) -> Outputs:
        checkpoint = inputs["checkpoint"]
        device = next(storage.live["model"].parameters()).device
        # From the file, so that what is saved is what is tested, not what is still in memory.
        saved = storage.tensors(checkpoint["model"])
        own = {name: saved[name].to(device) for name in checkpoint["shapes"]}
        storage.save("own", {name: describe(tensor)["checksum"] for name, tensor in own.items()})
        if checkpoint["sharded"]:
            whole = gather(own, checkpoint["shapes"], device)
        else:
            weight = checkpoint["rows"] if config.method == "weighted" else 1
            whole = average(own, weight, device)
        method = "gather" if checkpoint["sharded"] else config.method
        facts = {"layers": checkpoint["layers"], "method": method}
        if storage.rank == 0:
            storage.save_tensors("model", whole)
            storage.save("model", facts)
        return {"aggregated_model": {"model": storage.key("model", 0)} | facts}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        model, ranks = outputs["aggregated_model"], storage.of_ranks("own")
        whole = storage.tensors(model["model"])
        rows = []
        for name in ranks[0]:
            tensor, shape = whole[name], " x ".join(map(str, whole[name].shape))
            own = compare([checksums[name] for checksums in ranks], model["method"] == "gather")
            rows.append([name, shape, tensor.numel(), own, describe(tensor)["checksum"]])
        columns = ["tensor", "shape", "parameters", "on the ranks", "aggregated"]
        layers = ",".join(map(str, model["layers"]))
        return self.preview(columns, rows, method=model["method"], layers=layers)


def compare(checksums: list[str], is_sliced: bool) -> str:
    different = list(dict.fromkeys(checksums))
    verdict = "slices" if is_sliced else f"{len(different)} different"
    if len(different) == 1:
        verdict = "equal"
    return f"{verdict}: {', '.join(different)}"


Tensors = dict[str, torch.Tensor]  # by name


def average(own: Tensors, weight: float, device: torch.device) -> Tensors:
    """The mean of the ranks' models, each counted ``weight`` times.

    By rows it is federated averaging (McMahan et al., arXiv 1602.05629), here of models that should
    be equal.
    """
    total = torch.tensor(float(weight), device=device)
    dist.all_reduce(total)
    for tensor in own.values():
        # Weighted before the sum, so that the sum is the mean. The names are sorted, so all ranks
        # send the same tensor at the same time.
        tensor.mul_(weight / total)
        dist.all_reduce(tensor)
    return own


def gather(own: Tensors, shapes: dict[str, list[int]], device: torch.device) -> Tensors:
    """Whole tensors from the ranks' shards of their first dimension: one all-gather per tensor."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole = {}
    for name, tensor in own.items():
        shape = torch.Size(shapes[name])
        # The ranks' shards may have different sizes, so the whole shape has to be given.
        stride = torch.empty(shape, device="meta").stride()
        shard = DTensor.from_local(tensor, mesh, [Shard(0)], shape=shape, stride=stride)
        whole[name] = shard.full_tensor()
    return whole


class Evaluate(BaseCard[CardConfig]):
    """Card 12: count what the saved model gets right; each rank takes some of the test rows."""

    card_type = "dist_evaluate"
    display_name = "Evaluate"
    description = (
        "Reads the model from its file, divides the test rows over the ranks, and sums their "
        "counts."
    )
    look_at = (
        "Every test row is counted once, on one rank; the totals are summed, never the ranks' "
        "accuracies."
    )
    category = "evaluation"
    execution_mode = "distributed"
    output_view_type = "metrics"
    config_schema = CardConfig
    input_schema: ClassVar = {
        "aggregated_model": "aggregated_model",
        "prepared_data": "prepared_data",
    }
    output_schema: ClassVar = {"eval_metrics": "eval_metrics"}

    def execute(self, config: CardConfig, inputs: Values, storage: Storage) -> Outputs:
        prepared, key = inputs["prepared_data"], inputs["aggregated_model"]["model"]
        device = next(storage.live["model"].parameters()).device
        model = build_mlp(storage.load(key)["layers"])
        model.load_state_dict(storage.tensors(key))
        model.to(device).eval()

        data = storage.tensors(prepared["tensors"])
        # Every N-th row, without padding: each row is on exactly one rank, and counts once.
        own = slice(dist.get_rank(), None, dist.get_world_size())
        labels = data["test_labels"][own].to(device)
        with torch.no_grad():
            logits = model(data["test_features"][own].to(device))  # (own rows, classes)
        # Sums and counts, not means: the ranks may have different numbers of rows.
        loss = F.cross_entropy(logits, labels, reduction="sum").double()
        counts = confusion(labels, logits.argmax(1), len(prepared["classes"]))
        own_counts = {"rows": len(labels), "correct": int(counts.trace())}
        dist.all_reduce(loss)
        dist.all_reduce(counts)

        rows = int(counts.sum())
        metrics = {"rows": rows, "accuracy": int(counts.trace()) / rows, "loss": loss.item() / rows}
        metrics |= {"classes": prepared["classes"], "confusion": counts.tolist(), "own": own_counts}
        return {"eval_metrics": metrics}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        metrics = outputs["eval_metrics"]
        classes = zip(metrics["classes"], metrics["confusion"], strict=True)
        rows = [
            [name, *counts, f"{counts[number] / max(1, sum(counts)):.1%}"]
            for number, (name, counts) in enumerate(classes)
        ]
        return self.preview(
            ["class", *(f"predicted {name}" for name in metrics["classes"]), "correct"],
            rows,
            accuracy=f"{metrics['accuracy']:.2%}",
            loss=round(metrics["loss"], 4),
            test_rows=metrics["rows"],
        )

    def metrics(self, outputs: Values) -> dict[str, float]:
        return {name: outputs["eval_metrics"][name] for name in ("accuracy", "loss")}


def confusion(labels: torch.Tensor, predictions: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Rows by true class and predicted class, (classes, classes)."""
    # One number for each pair of classes, which is then its place in the table.
    pairs = labels * num_classes + predictions
    return pairs.bincount(minlength=num_classes**2).reshape(num_classes, num_classes)
