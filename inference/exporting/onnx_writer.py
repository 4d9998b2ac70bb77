"""Writes a classifier as an ONNX graph, in float32 or quantised to int8."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inference.engines.onnx_engine import FILE_NAME
from inference.exporting.encoder_graph import Config, Weights, build_module

OPSET = 20  # the first with a Gelu operator
_EXAMPLE_SHAPE = (2, 5)  # any shape will do: both sizes are symbols in the graph


def write_onnx(config: Config, weights: Weights, folder: Path, precision: str) -> dict[str, Any]:
    """Write `FILE_NAME` into a folder, and return how it was done, for the manifest.

    With precision ``int8`` weights are quantised per channel, and activations when they are
    computed; ``fp32`` changes nothing.
    """
    module, graph = build_module(config, weights, int8=precision == "int8")
    path = folder / FILE_NAME
    _export(module, path)
    options: dict[str, Any] = {"graph": graph, "opset": OPSET}
    if precision == "int8":
        _quantise(path)
        options |= {
            "quantisation": "dynamic",
            "weights": "int8 per channel, 7 bits",
            "embeddings": "int8 per word",
        }
    return options


def _export(module: nn.Module, path: Path) -> None:
    example = torch.ones(_EXAMPLE_SHAPE, dtype=torch.int64)
    sizes = {0: "texts", 1: "tokens"}
    with warnings.catch_warnings():
        # It warns that this exporter is old, and that traced shapes are constants, which
        # dynamic_axes makes them not.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (example, example),
            str(path),
            input_names=["input_ids", "attention_mask"],
            output_names=["logits"],
            dynamic_axes={"input_ids": sizes, "attention_mask": sizes, "logits": {0: "texts"}},
            opset_version=OPSET,
            dynamo=False,
        )


def _quantise(path: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    logging.getLogger().setLevel(logging.ERROR)  # the quantiser advises on the root logger
    quantize_dynamic(
        path,
        path,
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
        # 7 bits: without VNNI, processors sum products in 16 bits, which 8-bit weights could
        # overflow.
        reduce_range=True,
        weight_type=QuantType.QInt8,
        # Only products with weights. Both sides of attention's products are activations, which stay
        # in float32.
        extra_options={"MatMulConstBOnly": True},
    )
