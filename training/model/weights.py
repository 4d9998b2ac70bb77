"""Read a network of transformers, and refuse weights that do not fit it.

transformers draws what a file lacks at random, and drops what it has no place for. So a model whose
names or sizes differ from config.json would train from random weights. What belongs to the base
model has to fit; what lies outside of it is the head of some task, and a head of another task is
initialized again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from common.errors import UserError

# The layer above the first token, which transformers leaves out or initializes again, depending on
# the task.
POOLER = "pooler"


@dataclass(frozen=True)
class Reading:
    """What ``from_pretrained`` found. ``missing`` and ``wrong_shape`` are initialized again."""

    network: PreTrainedModel
    missing: Sequence[str]
    wrong_shape: Mapping[str, str]  # with both shapes
    unexpected: Sequence[str]

    @property
    def fresh(self) -> list[str]:
        return [*self.missing, *self.wrong_shape]

    @property
    def base(self) -> str:
        """What the names of the base model's weights begin with: nothing if the network has no
        head.
        """
        has_head = self.network.base_model is not self.network
        return f"{self.network.base_model_prefix}." if has_head else ""

    def lost(self, names: Sequence[str]) -> list[str]:
        """Those weights of the base model that a head may not lack."""
        parameters = dict(self.network.named_parameters())  # buffers are computed
        inside = (name for name in names if name.startswith(self.base) and name in parameters)
        pooler = f"{self.base}{POOLER}."
        return sorted(name for name in inside if not name.startswith(pooler))

    @property
    def left_over(self) -> list[str]:
        """Weights of the file for a part of the base model that has no place for them, such as
        those of more blocks.
        """
        return sorted(name for name in self.unexpected if self._belongs_to_base(name))

    def _belongs_to_base(self, name: str) -> bool:
        base = self.network.base_model
        inner = name.removeprefix(f"{self.network.base_model_prefix}.")
        part, (owner, _, own_name) = inner.partition(".")[0], inner.rpartition(".")
        if part == POOLER or getattr(base, part, None) is None:
            return False  # of a part that this task does not use, such as another head
        # A layer that is there may still lack this parameter, such as a bias. What is not a
        # parameter at all was computed by an older version, such as position_ids.
        try:
            return own_name in base.get_submodule(owner)._parameters
        except AttributeError:
            return True


def read_network(
    auto: Any, source: str, asked: str, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[Reading, list[str]]:
    """A network with the weights of a folder or hub model, and lines about them that the user
    should see.

    ``auto``: a class such as AutoModel; ``asked``: how an error names the model, such as ``--model
    NAME``; ``settings``: of the configuration, and ``revision``.

    Raises:
        UserError: the weights do not fit the network, or are not finite.
        OSError, ValueError: the model cannot be found or read.
    """
    notes, generator = [], torch.get_rng_state()
    reading = _read(auto, source, dtype, settings)
    if (missing := reading.lost(reading.missing)) and (prefix := _wrapper(reading, missing)):
        # Wrappers such as DDP, torch.compile and Lightning write the names of their attributes
        # before each name.
        wrapped = prefix.removesuffix(reading.base)
        target = "" if wrapped != prefix else reading.base
        torch.set_rng_state(generator)
        reading = _read(auto, source, dtype, settings, {f"^{re.escape(wrapped)}": target})
        what = f"The names of the weights of {asked} begin with {wrapped!r}"
        notes.append(f"{what}, which was removed")
    _check_fit(reading, asked)
    _check_finite(reading.network, asked)
    return reading, notes


def _read(
    auto: Any,
    source: str,
    dtype: torch.dtype,
    settings: Mapping[str, Any],
    renamed: Mapping[str, str] | None = None,
) -> Reading:
    network, found = auto.from_pretrained(
        source,
        ignore_mismatched_sizes=True,  # a head of another task; the rest is checked
        dtype=dtype,
        use_safetensors=True,
        # Run no code from next to the weights or from the hub, whatever config.json names.
        trust_remote_code=False,
        attn_implementation="eager",
        output_loading_info=True,
        key_mapping=renamed,
        **settings,
    )
    shapes = {
        name: f"{tuple(in_file)} in the file, {tuple(expected)} by config.json"
        for name, in_file, expected in found["mismatched_keys"]
    }
    return Reading(network, sorted(found["missing_keys"]), shapes, sorted(found["unexpected_keys"]))


def _wrapper(reading: Reading, missing: Sequence[str]) -> str:
    """What stands before the names of the base model's weights in the file; empty if that is not
    plain.
    """
    name = missing[0].removeprefix(reading.base)
    others = (other for other in reading.unexpected if other.endswith(f".{name}"))
    candidates = {other.removesuffix(name) for other in others}
    # Two copies, such as the encoders of questions and answers, leave open which one is meant.
    return candidates.pop() if len(candidates) == 1 else ""


def _check_fit(reading: Reading, asked: str) -> None:
    missing, wrong_shape = reading.lost(reading.missing), reading.lost(list(reading.wrong_shape))
    # Names that fit nothing say what happened if others are missing.
    left_over = reading.unexpected if missing else reading.left_over
    if not missing and not wrong_shape and not left_over:
        return
    total = sum(1 for _ in reading.network.base_model.parameters())
    parts = []
    if missing:
        parts.append(f"missing: {len(missing)} of {total}, first {missing[0]}")
    if wrong_shape:
        first = wrong_shape[0]
        parts.append(
            f"of another shape: {len(wrong_shape)} of {total}, first {first}, "
            f"{reading.wrong_shape[first]}"
        )
    if left_over:
        parts.append(f"left over: {len(left_over)}, first {left_over[0]}")
    raise UserError(
        f"{asked}: the weights do not fit the network of config.json ({'; '.join(parts)}); use "
        "the config.json that "
        "belongs to these weights, or write both again with save_pretrained",
        code="weights-unusable",
    )


def _check_finite(network: nn.Module, asked: str) -> None:
    bad = []
    for name, parameter in network.named_parameters():
        ends = torch.aminmax(parameter.detach()) if parameter.numel() else ()  # without a copy
        if not all(bool(torch.isfinite(end)) for end in ends):
            bad.append(name)
    if bad:
        raise UserError(
            f"{asked}: {len(bad)} of its weights hold nan or infinity, first {bad[0]}; copy the "
            "model again, or "
            "use an earlier checkpoint of it",
            code="weights-unusable",
        )


def stored_dtype(name: str, revision: str | None = None) -> torch.dtype:
    """fp16 or bf16 if all weights of a local folder, or of a hub model in the cache, are stored in
    it; else fp32.
    """
    folder = Path(name)
    if not folder.is_dir():
        try:
            config = try_to_load_from_cache(name, "config.json", revision=revision)
        except HFValidationError:  # loading raises a better error
            config = None
        folder = Path(config).parent if isinstance(config, str) else folder
    kinds = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as weights:
            kinds |= {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    return {("F16",): torch.float16, ("BF16",): torch.bfloat16}.get(tuple(kinds), torch.float32)


def redraw(network: PreTrainedModel, names: Sequence[str]) -> None:
    """Initialise in fp32 what the file lacks: ``from_pretrained`` has drawn it in the precision of
    the file.
    """
    for name in names:
        owner, _, own_name = name.rpartition(".")
        module = network.get_submodule(owner)
        empty = torch.empty_like(getattr(module, own_name), dtype=torch.float32)
        setattr(module, own_name, nn.Parameter(empty))
        module._is_hf_initialized = False  # tells transformers 5 to initialise it again
    network.initialize_weights()
