"""The weights of a saved model, as transformers reads them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from common.windows import ATTENTION_KEY

if TYPE_CHECKING:
    import torch

_OLD_NORM = re.compile(r"layer_?norm\.(gamma|beta)$", re.IGNORECASE)
# Buffers that are always the same, which older versions of transformers wrote with the weights.
_CONSTANTS = ("position_ids", "token_type_ids")


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file, or an old pytorch_model.bin of plain tensors, into memory.

    `load_file` only maps it. Overwriting the file would then change answers, and truncating it kill
    the process.
    """
    import torch
    from safetensors.torch import load_file

    # Old files are pickles, which may hold code; weights_only reads no more than tensors.
    found = (
        torch.load(path, map_location="cpu", weights_only=True)
        if path.suffix == ".bin"
        else load_file(path)
    )
    return {_current_name(name): tensor.clone() for name, tensor in found.items()}


def _current_name(name: str) -> str:
    """The first BERT, and models converted from it, name a layer norm's weights differently."""
    if (old := _OLD_NORM.search(name)) is None:
        return name
    return name[: old.start(1)] + {"gamma": "weight", "beta": "bias"}[old[1].lower()]


def changes_nothing(name: str, model: torch.nn.Module) -> bool:
    """Whether a weight that this classifier of transformers has no place for changes none of its
    answers.

    Such are the heads of pretraining (``cls.*``, ``lm_head.*``), a pooler that the classifier does
    not read, and the weights of a loss: whole modules next to the encoder or at its end. What
    belongs inside the modules that the classifier has, such as a seventh block, or a bias where
    config.json says that there is none, would change them.
    """
    if name.rpartition(".")[2] in _CONSTANTS:
        return True
    if name == ATTENTION_KEY:  # of a model whose config.json has lost its windows
        return False
    # Follow the name from module to module as far as the model has them: `rest` is what it lacks.
    modules = {one for one, _ in model.named_modules()}
    parent, rest = "", name
    while (child := f"{parent}.{rest.partition('.')[0]}".lstrip(".")) in modules:
        parent, rest = child, rest.partition(".")[2]
    return parent in ("", model.base_model_prefix) and "." in rest
