"""PyTorch as the runtime: a transformers classifier on a GPU if there is one, else on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from common.text import segments_of, type_separator
from common.weights import changes_nothing, read_weights
from inference.engines.base import CPU_BATCH_TOKENS, TokenBatch
from inference.engines.windowed import config_with_attention, weights_with_attention

# Errors are raised as one line. Progress bars and loading reports do not belong in a server's log.
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

logger = logging.getLogger(__name__)

# In passes of 512 tokens a GPU spends most of its time reading the weights.
_GPU_BATCH_TOKENS = 8192
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TorchEngine:
    """Runs a transformers ``*ForSequenceClassification``."""

    num_slots = 1
    pads = True
    survives_fork = False

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Path | Mapping[str, torch.Tensor],
        precision: str | None = None,
        *,
        compiled: bool = False,
        device: str = "auto",
    ) -> None:
        """Build the classifier and fill in its weights.

        Args:
            config: The contents of a transformers ``config.json``.
            weights: A safetensors file, or the state dict itself, with transformers' names.
            precision: A key of `_DTYPES`; by default half precision on a GPU and float32 on the
                CPU.
            compiled: Whether to use torch.compile; the first passes then take a minute.
            device: ``cpu``, ``cuda``, or ``auto`` for CUDA if PyTorch can use it.

        Raises:
            ValueError: transformers has no classifier for this configuration, or the weights do not
                fit it.
        """
        state_dict = read_weights(weights) if isinstance(weights, Path) else dict(weights)
        config, state_dict = (
            config_with_attention(config),
            weights_with_attention(config, state_dict),
        )
        found = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(found if device == "auto" else device)
        self.batch_tokens = _GPU_BATCH_TOKENS if self.device.type == "cuda" else CPU_BATCH_TOKENS
        self.precision = precision or _fast_precision(self.device)
        self.name = f"torch {self.device.type} {self.precision}{' compiled' if compiled else ''}"
        self._pad_id: int | None = config.get("pad_token_id")
        self._separator = type_separator(config)
        model = build_model(config, state_dict).to(self.device, _DTYPES[self.precision]).eval()
        self._config = model.config.get_text_config()
        self._model = torch.compile(model, dynamic=True) if compiled else model

    @torch.inference_mode()
    def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        pad_id = self._pad_id
        if pad_id is None:
            # A decoder reads the last token that is not padding, so padding must be an id that no
            # text has.
            unused = np.setdiff1d(np.arange(len(batch.ids) + 1), batch.ids)[0]
            pad_id = self._config.pad_token_id = min(int(unused), self._config.vocab_size - 1)
        input_ids, attention_mask = (
            torch.from_numpy(array).to(self.device) for array in batch.padded(pad_id)
        )
        # ids and mask: (texts, longest); logits: (texts, labels).
        types = token_types(self._separator, input_ids)
        output = self._model(input_ids=input_ids, attention_mask=attention_mask, **types)
        return output.logits.float().cpu().numpy()


def token_types(separator: int | None, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a model with this `type_separator` is told besides ids and mask."""
    return {} if separator is None else {"token_type_ids": segments_of(input_ids, separator)}


def _fast_precision(device: torch.device) -> str:
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def build_model(config: Mapping[str, Any], state_dict: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Build the transformers classifier of a ``config.json``; raises as `TorchEngine`."""
    model_config = AutoConfig.for_model(**config)
    model_class = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(model_config)]
    model, report = model_class.from_pretrained(
        None,
        config=model_config,
        state_dict=state_dict,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # reported below with the rest, in one line
        output_loading_info=True,
    )
    others = {name for name in report["unexpected_keys"] if changes_nothing(name, model)}
    if others:
        what = "%d weights change no answer of %s and are not used, first %s"
        logger.warning(what, len(others), model_class.__name__, min(others))
    report["unexpected_keys"] = set(report["unexpected_keys"]) - others
    # transformers fills what is missing with random numbers, which a server must not answer from.
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report[kind]:
            names = sorted(key[0] if isinstance(key, tuple) else key for key in report[kind])
            raise ValueError(
                f"{len(names)} {kind.replace('_', ' ')} for {model_class.__name__}, first "
                f"{names[0]}"
            )
    return model
