"""Small classifiers of every family that the kernels compute, with random weights or with weights from integer
arithmetic, and what a driver for other processors reads."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers as hf
from safetensors.numpy import load_file

from inference.engines.native.engine import NativeEngine
from inference.engines.native.quantize import WEIGHT_MAX, write_native

VOCABULARY, POSITIONS = 300, 160
# Around the sizes of a step (16), a tile (4, 6), a block of rows (48) and a window (16).
LENGTHS = [1, 2, 15, 16, 17, 5, 31, 33, 47, 48, 49, 63, 64, 65, 3, 97, 128, 160]
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 208,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "initializer_range": 0.1,
    "num_labels": 5,
}
_BERT = _SIZES | {"max_position_embeddings": POSITIONS}
# These families count positions from behind the padding id.
_ROBERTA = _SIZES | {"max_position_embeddings": POSITIONS + 2, "pad_token_id": 1}
_SPECIAL_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1) | {"pad_token_id": 0}


def distilbert(**changes: object) -> hf.PreTrainedModel:
    sizes = {"dim": 96, "hidden_dim": 208, "n_heads": 3, "n_layers": 3, "vocab_size": VOCABULARY, "num_labels": 5}
    sizes |= {"max_position_embeddings": POSITIONS, "initializer_range": 0.1}
    return hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**sizes | changes))


def modernbert(**changes: object) -> hf.PreTrainedModel:
    sizes = _BERT | _SPECIAL_IDS | {"num_hidden_layers": 5, "local_attention": 32}
    return hf.ModernBertForSequenceClassification(hf.ModernBertConfig(**sizes | changes))


def bert(**changes: object) -> hf.PreTrainedModel:
    return hf.BertForSequenceClassification(hf.BertConfig(**_BERT | changes))


MODELS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "distilbert": distilbert,
    "distilbert with relu": lambda: distilbert(activation="relu"),
    "one block": lambda: distilbert(n_layers=1),
    "bert": bert,
    "roberta": lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**_ROBERTA)),
    "xlm-roberta": lambda: hf.XLMRobertaForSequenceClassification(hf.XLMRobertaConfig(**_ROBERTA)),
    "camembert": lambda: hf.CamembertForSequenceClassification(hf.CamembertConfig(**_ROBERTA)),
    "electra": lambda: hf.ElectraForSequenceClassification(hf.ElectraConfig(**_BERT, embedding_size=128)),
    "electra with narrow embeddings": lambda: hf.ElectraForSequenceClassification(
        hf.ElectraConfig(**_BERT, embedding_size=48)
    ),
    "mpnet": lambda: hf.MPNetForSequenceClassification(hf.MPNetConfig(**_ROBERTA)),
    "modernbert": modernbert,
    "modernbert with means and biases": lambda: modernbert(
        classifier_pooling="mean", attention_bias=True, mlp_bias=True, norm_bias=True, classifier_bias=True
    ),
}


def make_engine(
    model: hf.PreTrainedModel, folder: Path, threads: int = 2, instructions: str = "auto"
) -> tuple[NativeEngine, hf.PreTrainedModel]:
    model.eval().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    write_native(config, load_file(folder / "model.safetensors"), folder)
    return NativeEngine(folder, config, threads, instructions), model


def randomise(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """Biases and norms too, which begin as zeros and ones and would hide a mistake."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name.lower():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def hashed(name: str, size: int) -> np.ndarray:
    """Numbers that look random and are the same for every version of NumPy: the last steps of MurmurHash3 over a
    count, (size,)."""
    numbers = np.arange(size, dtype=np.uint32) + np.uint32(zlib.crc32(name.encode()))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        numbers = (numbers ^ (numbers >> np.uint32(shift))) * np.uint32(factor)
    return numbers.astype(np.int64)


def exact_weights(model: hf.PreTrainedModel) -> dict[str, np.ndarray]:
    """Weights that every machine quantises to the same bytes: multiples of 2^-8, which int8 keeps without an error (but
    for a query's factor of 1 / sqrt(head size)). Of the model's own weights only names and shapes are read."""
    weights = {}
    for name, tensor in model.state_dict().items():
        levels = hashed(name, tensor.numel()).reshape(tensor.shape) % (2 * WEIGHT_MAX + 1) - WEIGHT_MAX
        if levels.ndim == 2:
            levels[:, 0] = WEIGHT_MAX  # so each output's scale is exactly 2^-8
        is_gain = "norm" in name.lower() and name.endswith("weight")
        weights[name] = (levels / 256 + is_gain).astype(np.float32)
    return weights


def random_texts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCABULARY, length).tolist() for length in lengths]


@torch.inference_mode()
def reference_logits(model: hf.PreTrainedModel, texts: list[list[int]]) -> np.ndarray:
    # Without a mask transformers takes a padding id inside of a text for padding.
    inputs = [torch.tensor([ids]) for ids in texts]
    return np.concatenate([model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.numpy() for ids in inputs])


def write_image(engine: NativeEngine, file: Path, pointer_bytes: int = 8) -> None:
    """Write a loaded model for forward_image.c."""
    memory, pointers, *_ = engine.image(pointer_bytes)
    file.write_bytes(struct.pack(f"<Q{len(pointers)}QQ", len(pointers), *pointers, len(memory)) + memory)


def write_batch(texts: list[list[int]], file: Path) -> None:
    numbers = [
        len(texts),
        sum(map(len, texts)),
        *np.cumsum([0, *map(len, texts)]),
        *(i for text in texts for i in text),
    ]
    file.write_bytes(np.array(numbers, dtype=np.int32).tobytes())
