"""Layers by their depth: which are kept (``--layers``), which are not trained (``--freeze``), and
how fast the rest learns (``--layer_decay``).

The lower a layer of a pretrained encoder, the more general is what it knows, and the less it has to
change for a new task. A parameter's depth follows from its name, which is the same in a pipeline
stage and in a shard.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import nn

from common.encoders import FAMILIES, EncoderFamily
from common.errors import UserError
from training.config import TrainConfig

FAMILY_OF = {family.network_class: family for family in FAMILIES}


def keep_blocks(network: nn.Module, count: int, model: str) -> None:
    """Leave out all but ``count`` blocks, in place; the rest of the network stays as it is.

    They are evenly spaced, with the first and the last among them: of twelve 0, 2, 4, 7, 9 and 11,
    the ones from which DistilBERT began (Sanh et al., arXiv 1910.01108, section 3, and their script
    extract_distilbert.py).

    Raises:
        UserError: the network's family is not known, or it has fewer blocks.
    """
    family = _known_family(network, f"--layers {count}")
    owner, _, name = family.blocks.rpartition(".")
    blocks = network.get_submodule(family.blocks)
    if count > len(blocks):
        raise UserError(
            f"--layers {count}: --model {model} has {len(blocks)} blocks; keep at most that many",
            code="flag-value",
        )
    kept = np.linspace(0, len(blocks) - 1, count).round().astype(int).tolist()
    setattr(network.get_submodule(owner), name, nn.ModuleList(blocks[i] for i in kept))
    # Whoever loads the written model builds it from its configuration.
    network.config.num_hidden_layers = count
    if getattr(network.config, "layer_types", None):  # how each block attends, such as ModernBERT's
        network.config.layer_types = [network.config.layer_types[i] for i in kept]


def check_depths(network: nn.Module, config: TrainConfig) -> None:
    """Check that the network has the layers that ``--freeze`` and ``--layer_decay`` speak of.

    Raises:
        UserError: its family is not known, or it has fewer blocks than should be frozen.
    """
    for flag, off in (("freeze", "none"), ("layer_decay", 1)):
        if (value := getattr(config, flag)) != off:
            _known_family(network, f"--{flag} {value}")
    if config.freeze != "none" and config.frozen_depth > network.config.num_hidden_layers:
        raise UserError(
            f"--freeze {config.freeze}: --model {config.model} has "
            f"{network.config.num_hidden_layers} blocks; freeze at most that many",
            code="flag-value",
        )


def _known_family(network: nn.Module, asked: str) -> EncoderFamily:
    kind = type(network).__name__
    if kind not in FAMILY_OF:
        known = ", ".join(family.name for family in FAMILIES)
        raise UserError(
            f"{asked}: the layers of {kind} are not known, only those of {known}; leave it out",
            code="model-layers-unknown",
        )
    return FAMILY_OF[kind]


def freeze_layers(network: nn.Module, config: TrainConfig) -> None:
    """Take what ``--freeze`` names out of training, and so out of the backward pass; before a
    strategy is applied.
    """
    if config.freeze == "none":
        return
    depth_of = _depths(network)
    for name, parameter in network.named_parameters():
        if depth_of(name) <= config.frozen_depth:
            parameter.requires_grad_(False)


def rate_factors(network: nn.Module, decay: float) -> Callable[[str], float]:
    """By what the learning rate is multiplied, by the name of a parameter in the network.

    1 in the head, ``decay`` in the highest block, and again times ``decay`` in each one below
    (Clark et al., "ELECTRA", arXiv 2003.10555, appendix B; Bao et al., "BEiT", arXiv 2106.08254).
    """
    if decay == 1:
        return lambda name: 1.0
    depth_of, head = _depths(network), network.config.num_hidden_layers + 1
    return lambda name: decay ** (head - depth_of(name))


def _depths(network: nn.Module) -> Callable[[str], int]:
    family, num_blocks = FAMILY_OF[type(network).__name__], network.config.num_hidden_layers
    return lambda name: family.depth_of(name, num_blocks)
