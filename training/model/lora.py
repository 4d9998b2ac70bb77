"""LoRA (Hu et al., arXiv 2106.09685): the encoder stays as it is, and small matrices beside its
linear layers learn.

A linear layer with the frozen weight W, (out, in), gets two adapters, A (rank, in) and B (out,
rank), and computes ``x W^T + alpha / rank * (x A^T) B^T``. B begins at zero, so training begins
with the model as it was. In the end their product is added to W, so the written model has no
adapters.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import nn
from transformers import PreTrainedModel

from common.errors import UserError
from training.config import TrainConfig
from training.model.classifier import NewsClassifier

ADAPTER = "default"  # the name that peft gives to an adapter


def check_lora(config: TrainConfig) -> None:
    """Check that a run with ``--lora`` finds peft.

    Raises:
        UserError: it is not installed.
    """
    if not config.lora:
        return
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--lora {config.lora}: peft is not installed ({error}); pip install "
            '"distrinews[lora]"',
            code="package-missing",
        ) from error


def add_adapters(model: NewsClassifier, config: TrainConfig) -> None:
    """Freeze the model, in place, but for its head, and put adapters beside the linear layers of
    all blocks.

    A language model's head is frozen too, since it is not new. The adapters are a function of the
    seed. Module names change: the weight of a layer is then its ``base_layer.weight``. What does
    not require a gradient before does not get one.

    Raises:
        UserError: the blocks have no linear layers, or the network is the user's own.
    """
    from peft import LoraConfig, inject_adapter_in_model

    network = model.network
    if not isinstance(network, PreTrainedModel):
        raise UserError(
            f"--lora {config.lora} and --network: only encoders of transformers get adapters; "
            "drop one",
            code="flags-conflict",
        )
    layers = _trained_linear_layers(model)
    if not layers:
        raise UserError(
            f"--lora {config.lora} and --model {config.model}: no linear layers were found in "
            "repeated blocks; "
            "leave out --lora",
            code="model-no-blocks",
        )
    # Asked before peft freezes everything. A layer that gets adapters has other names afterwards,
    # and stays frozen.
    head = set() if model.task.is_language_model else _trained_head(model)
    adapters = LoraConfig(
        r=config.lora, lora_alpha=config.adapter_alpha, target_modules=layers, lora_dropout=0.0
    )
    # The adapters draw from the seed alone, and nothing that is drawn later depends on how much
    # they took.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        inject_adapter_in_model(adapters, network, ADAPTER)
    for name, parameter in network.named_parameters():
        if name in head:
            parameter.requires_grad_(True)


def _trained_linear_layers(model: NewsClassifier) -> list[str]:
    """The names of those in the model's blocks."""
    inside = {module for block in model.blocks for module in block.modules()}
    return [
        name
        for name, module in model.network.named_modules()
        if isinstance(module, nn.Linear) and module in inside and module.weight.requires_grad
    ]


def _trained_head(model: NewsClassifier) -> set[str]:
    """The names of its parameters."""
    # The head is what is not in the base model; a few families also keep a pooler or a last norm
    # there.
    head = tuple(f"{name}." for name in (model.architecture.head if model.architecture else ()))
    base = f"{model.network.base_model_prefix}."
    return {
        name
        for name, parameter in model.network.named_parameters()
        if parameter.requires_grad and (not name.startswith(base) or name.startswith(head))
    }


def merge_adapters(
    weights: dict[str, torch.Tensor], config: TrainConfig
) -> dict[str, torch.Tensor]:
    """The whole weights of a model with adapters as those of an ordinary one: W + alpha / rank * B
    A.
    """
    merged = {}
    for name, tensor in weights.items():
        layer, has_adapters, own = name.partition(".base_layer.")
        if has_adapters and own == "weight":
            a, b = (weights[f"{layer}.{which}.{ADAPTER}.weight"] for which in ("lora_A", "lora_B"))
            tensor = tensor + config.adapter_alpha / config.lora * (b @ a)
        if ".lora_" not in name:
            merged[f"{layer}.{own}" if has_adapters else name] = tensor
    return merged


def frozen_hash(model: NewsClassifier) -> str:
    """A hash of all weights that are not trained, which checkpoints of a run with adapters leave
    out.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        if name not in trained:
            found.update(name.encode())
            # As bytes, because NumPy knows no bf16.
            found.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()
