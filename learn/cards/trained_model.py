"""Card 11: make one model of what the ranks have saved."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from learn.cards.base import BaseCard, CardConfig, Preview, Values
from learn.cards.held import describe
from learn.cards.storage import Storage


class AggregateModelConfig(CardConfig):
    """How several models become one."""

    method: Literal["average", "weighted"] = Field(
        "average", description="every rank's model counts the same, or by the rows that it was trained on"
    )


class AggregateModel(BaseCard[AggregateModelConfig]):
    """Averages whole models, and puts slices of one together."""

    card_type = "dist_aggregate_model"
    display_name = "Aggregate model"
    description = "Averages the models of the ranks; slices of one model (FSDP) are gathered instead."
    look_at = "The ranks' models are equal, or a step went without the all-reduce; the mean differs by rounding alone."
    category = "aggregation"
    execution_mode = "distributed"
    output_view_type = "model_summary"
    config_schema = AggregateModelConfig
    input_schema: ClassVar = {"checkpoint": "checkpoint"}
    output_schema: ClassVar = {"aggregated_model": "aggregated_model"}

    def execute(self, config: AggregateModelConfig, inputs: Values, storage: Storage) -> dict[str, Any]:
        """Read this rank's file, and make the whole model of all; rank 0 writes it."""
        checkpoint = inputs["checkpoint"]
        device = next(storage.live["model"].parameters()).device
        saved = storage.tensors(checkpoint["model"])
        own = {name: saved[name].to(device) for name in checkpoint["shapes"]}
        storage.save("own", {name: describe(tensor)["checksum"] for name, tensor in own.items()})
        if checkpoint["sharded"]:
            whole = gather(own, checkpoint["shapes"], device)
        else:
            whole = average(own, checkpoint["rows"] if config.method == "weighted" else 1, device)
        method = "gather" if checkpoint["sharded"] else config.method
        facts = {"layers": checkpoint["layers"], "method": method}
        if storage.rank == 0:
            storage.save_tensors("model", whole)
            storage.save("model", facts)
        return {"aggregated_model": {"model": storage.key("model", 0)} | facts}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        """The tensors of the one model, and their checksums beside those of what each rank had saved."""
        model, ranks = outputs["aggregated_model"], storage.of_ranks("own")
        whole = storage.tensors(model["model"])
        rows = []
        for name in ranks[0]:
            tensor, shape = whole[name], " x ".join(map(str, whole[name].shape))
            own = compare([checksums[name] for checksums in ranks], model["method"] == "gather")
            rows.append([name, shape, tensor.numel(), own, describe(tensor)["checksum"]])
        columns = ["tensor", "shape", "parameters", "on the ranks", "aggregated"]
        return self.preview(columns, rows, method=model["method"], layers=",".join(map(str, model["layers"])))


def compare(checksums: list[str], is_sliced: bool) -> str:
    """Whether the ranks had saved the same of a tensor, with the checksums that there are."""
    different = list(dict.fromkeys(checksums))
    verdict = "equal" if len(different) == 1 else "slices" if is_sliced else f"{len(different)} different"
    return f"{verdict}: {', '.join(different)}"


def average(own: dict[str, torch.Tensor], weight: float, device: torch.device) -> dict[str, torch.Tensor]:
    """The mean of the ranks' models, each counted ``weight`` times.

    By rows it is federated averaging (McMahan et al., arXiv 1602.05629), here of models that should be equal.
    """
    total = torch.tensor(float(weight), device=device)
    dist.all_reduce(total)
    for tensor in own.values():
        tensor.mul_(weight / total)
        dist.all_reduce(tensor)
    return own


def gather(own: dict[str, torch.Tensor], shapes: dict[str, list[int]], device: torch.device) -> dict[str, torch.Tensor]:
    """Whole tensors of the ranks' slices of their first dimension: an all-gather each.

    Args:
        own: this rank's slices; the last ranks' may be shorter, or empty.
        shapes: of the whole tensors.
        device: that they lie on.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole = {}
    for name, tensor in own.items():
        shape = torch.Size(shapes[name])
        stride = torch.empty(shape, device="meta").stride()
        whole[name] = DTensor.from_local(tensor, mesh, [Shard(0)], shape=shape, stride=stride).full_tensor()
    return whole
