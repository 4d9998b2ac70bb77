"""Writes a classifier as an OpenVINO graph whose weights and activations are int8."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino
import torch

from inference.engines.openvino_engine import FILE_NAME
from inference.exporting.encoder_graph import Config, Weights, build_module

_EXAMPLE_SHAPE = (2, 5)  # any shape will do: both sizes are symbols in the graph
_OPEN_SHAPE = [-1, -1]


def write_openvino(
    config: Config, weights: Weights, calibration: Sequence[Sequence[int]], folder: Path
) -> dict[str, Any]:
    """Write `FILE_NAME` and its weights into a folder, and return how it was done, for the
    manifest.

    ``calibration`` has the token ids of texts that show how large activations become.
    """
    # The module makes embeddings int8, because the plugin would unpack those that NNCF quantises
    # (90 MB for DistilBERT-base).
    module, graph = build_module(config, weights, int8=True)
    example = torch.ones(_EXAMPLE_SHAPE, dtype=torch.int64)
    inputs = [(name, _OPEN_SHAPE, np.int64) for name in ("input_ids", "attention_mask")]
    logging.getLogger("nncf").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # That traced shapes are constants, which `input` makes them not.
        warnings.simplefilter("ignore")
        model = openvino.convert_model(module, example_input=(example, example), input=inputs)
        quantised = nncf.quantize(
            model,
            nncf.Dataset(calibration, _as_inputs),
            subset_size=len(calibration),
            model_type=nncf.ModelType.TRANSFORMER,
            # 7 bits: without VNNI, processors sum products in 16 bits, which 8-bit weights could
            # overflow.
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                overflow_fix=nncf.OverflowFix.ENABLE
            ),
        )
    openvino.save_model(quantised, folder / FILE_NAME, compress_to_fp16=False)
    return {
        "graph": graph,
        "quantisation": "static",
        "calibration_texts": len(calibration),
        "weights": "int8 per channel, 7 bits",
        "embeddings": "int8 per word",
    }


def _as_inputs(ids: Sequence[int]) -> dict[str, np.ndarray]:
    return {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), dtype=np.int64)}
