"""Writes a classifier as an ONNX graph, in float32 or quantised to int8."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inference.engines.native.architecture import EncoderShape
from inference.engines.onnx_engine import FILE_NAME
from inference.exporting.encoder_graph import EncoderGraph

OPSET = 20  # the first with a Gelu of its own
_EXAMPLE_SHAPE = (2, 5)  # any: both sizes stay open in the graph

Config = Mapping[str, Any]
Weights = Mapping[str, Tensor]


def build_module(config: Config, weights: Weights, *, int8: bool) -> tuple[nn.Module, str]:
    """Return the module to export and what kind of graph it is: ``lean`` where `EncoderGraph` knows it, else ``whole``.

    Args:
        config: The contents of a transformers ``config.json``.
        weights: The state dict, names as transformers gives them.
        int8: The weights are going to be quantised, so that the embeddings may be as well.
    """
    try:
        shape = EncoderShape.of(config)
    except ValueError:
        return _WholeModel(config, weights).eval(), "whole"
    return EncoderGraph(shape, weights, small_embeddings=int8).eval(), "lean"


class _WholeModel(nn.Module):
    """The transformers classifier itself, for architectures that `EncoderGraph` does not know."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__()
        from inference.engines.torch_engine import build_model

        self.model = build_model({**config, "attn_implementation": "eager"}, dict(weights))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


def write_onnx(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path, precision: str
) -> dict[str, Any]:
    """Write `FILE_NAME` into a folder.

    Args:
        config: The contents of a transformers ``config.json``.
        weights: The state dict, names as transformers gives them.
        folder: An existing folder.
        precision: ``fp32``, or ``int8``: weights quantised a channel, activations when they are known.

    Returns:
        How it was done, for the manifest.
    """
    module, graph = build_module(config, weights, int8=precision == "int8")
    path = folder / FILE_NAME
    _export(module, path)
    options: dict[str, Any] = {"graph": graph, "opset": OPSET}
    if precision == "int8":
        _quantise(path)
        options |= {"quantisation": "dynamic", "weights": "int8 per channel, 7 bits", "embeddings": "int8 per word"}
    return options


def _export(module: nn.Module, path: Path) -> None:
    example = torch.ones(_EXAMPLE_SHAPE, dtype=torch.int64)
    sizes = {0: "texts", 1: "tokens"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's age, and of traced shapes that are open all the same
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
        # 7 bits: on processors without VNNI the sums of 8 would overflow 16-bit registers.
        reduce_range=True,
        weight_type=QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True},
    )
