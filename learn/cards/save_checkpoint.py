"""Card 10: write what was trained to files, with all that it takes to read them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.distributed.fsdp import FSDPModule

from learn.cards.base import BaseCard, CardConfig, Preview, Values
from learn.cards.held import describe, own_part
from learn.cards.model import layer_sizes
from learn.cards.storage import Storage


class SaveCheckpointConfig(CardConfig):
    """What is saved, and when."""

    epoch: int = Field(30, ge=1, le=10_000, description="the epoch after which it is saved: how long training goes on")
    save_all_ranks: bool = Field(True, description="every rank saves what it holds; else rank 0 alone, the whole model")


class SaveCheckpoint(BaseCard[SaveCheckpointConfig]):
    """Writes weights as safetensors, and the architecture as JSON beside them."""

    card_type = "dist_save_checkpoint"
    display_name = "Save checkpoint"
    description = "Every rank writes what it holds of the model, or rank 0 the whole, and the architecture beside it."
    look_at = "Under DDP every file holds the same model; under FSDP each holds a slice of it."
    category = "checkpointing"
    execution_mode = "distributed"
    output_view_type = "table"
    config_schema = SaveCheckpointConfig
    input_schema: ClassVar = {"updated_model": "updated_model"}
    output_schema: ClassVar = {"checkpoint": "checkpoint"}

    def execute(self, config: SaveCheckpointConfig, inputs: Values, storage: Storage) -> dict[str, Any]:
        """Write ``model.safetensors`` and ``model.json``; the output says under which key this rank finds its own."""
        model = storage.live["model"]
        sharded = isinstance(model, FSDPModule) and config.save_all_ranks
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
        return {"checkpoint": {"model": storage.key("model", None if config.save_all_ranks else 0)} | facts}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        """The files, and the checksum of the first weights in each."""
        checkpoint = outputs["checkpoint"]
        first = next(iter(checkpoint["shapes"]))  # as on the other cards; a file has the names sorted
        rows = []
        for key in dict.fromkeys(found["checkpoint"]["model"] for found in storage.of_ranks("outputs")):
            weights = storage.tensors(key)
            count = sum(tensor.numel() for tensor in weights.values())
            rows.append([f"{key}.safetensors", count, describe(weights[first])["checksum"]])
        layers = ",".join(map(str, checkpoint["layers"]))
        return self.preview(["file", "numbers", "first weights"], rows, epoch=checkpoint["epoch"], layers=layers)


def own_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What lies on this rank: the model, or its slice of every tensor."""
    return {name: own_part(parameter) for name, parameter in model.named_parameters()}


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole model; where it is sharded an all-gather, which all ranks must join."""
    if not isinstance(model, FSDPModule):
        return own_weights(model)
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
