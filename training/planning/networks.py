"""Networks of a shape, for dry runs: built on fake tensors, computing as a GPU would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
)

from training.model.architectures import ARCHITECTURES, Architecture, Bert, DistilBert, Llama
from training.model.classifier import NewsClassifier
from training.model.dropout import RowDropout
from training.parallelism.tensor_parallel import FAMILIES, Plan
from training.parallelism.tensor_styles import VocabularyParallel, WholeParameters
from training.planning.shapes import ModelShape

FUSED_ATTENTION = "fused_as_on_gpus"


class _WholeRows(Architecture):
    """Rows without padding, which no mask needs to be known for."""

    def context(self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, Any]:
        """No mask."""
        return {"attention_mask": None}


class _DistilBert(_WholeRows, DistilBert):
    pass


class _Bert(_WholeRows, Bert):
    pass


class _LlamaLanguageModel(Llama):
    head = ("model.norm", "lm_head")

    def classify(self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Logits of every token: (batch, seq, vocabulary)."""
        return network.lm_head(network.model.norm(hidden))


class _GPT2LanguageModel(_WholeRows):
    embeddings = "transformer.wte"
    blocks = "transformer.h"
    head = ("transformer.ln_f", "lm_head")

    def embed(self, network: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
        """Words and positions: (batch, seq) -> (batch, seq, hidden)."""
        parts = network.transformer
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return parts.drop(parts.wte(input_ids) + parts.wpe(positions))

    def classify(self, network: PreTrainedModel, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Logits of every token: (batch, seq, vocabulary)."""
        return network.lm_head(network.transformer.ln_f(hidden))


def _llama_ends(layout: Placement) -> Plan:
    # Each rank has the logits of its part of the vocabulary, and their loss.
    return {
        "model.embed_tokens": VocabularyParallel(layout),
        "model.norm": WholeParameters(Replicate()),
        "lm_head": ColwiseParallel(),
    }


_WITHOUT_MASKS: dict[str, Architecture] = {
    "DistilBertForSequenceClassification": _DistilBert(),
    "BertForSequenceClassification": _Bert(),
}
# Language models are planned, not trained here.
ARCHITECTURES |= {"LlamaForCausalLM": _LlamaLanguageModel(), "GPT2LMHeadModel": _GPT2LanguageModel()}
FAMILIES |= {"LlamaForCausalLM": replace(FAMILIES["LlamaForSequenceClassification"], ends=_llama_ends)}


def build_model(shape: ModelShape, *, as_on_gpus: bool) -> NewsClassifier:
    """The network of a shape as training holds it; under ``FakeTensorMode`` it takes no memory.

    Args:
        as_on_gpus: keep for the backward pass what a GPU's kernels keep: of attention no scores, of dropout one byte
            a value, of LayerNorm fp32 under autocast. Without: what training keeps on a CPU.
    """
    model = model_of(shape)
    model.architecture = _WITHOUT_MASKS.get(type(model.network).__name__, model.architecture)
    model.dropout_stream.draws = _no_draws
    if as_on_gpus:
        model.network.config._attn_implementation = FUSED_ATTENTION
        _compute_as_on_gpus(model.network)
    return model.train()


def model_of(shape: ModelShape) -> NewsClassifier:
    """A model of this shape with random weights, as training makes it."""
    kind = AutoModelForCausalLM if shape.num_labels is None else AutoModelForSequenceClassification
    model = NewsClassifier.__new__(NewsClassifier)
    nn.Module.__init__(model)
    model._adopt(kind.from_config(network_config(shape)), [str(i) for i in range(shape.num_labels or 0)])
    return model


def network_config(shape: ModelShape) -> PreTrainedConfig:
    """The configuration of transformers whose network has this shape."""
    size = {"vocab_size": shape.vocab, "max_position_embeddings": shape.max_positions}
    labels = {"num_labels": shape.num_labels} if shape.num_labels else {}
    usual = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate,
    }
    if shape.family == "distilbert":
        widths = {"dim": shape.hidden, "hidden_dim": shape.intermediate}
        return DistilBertConfig(n_layers=shape.layers, n_heads=shape.heads, **widths, **size, **labels)
    if shape.family in ("bert", "roberta"):
        kind = BertConfig if shape.family == "bert" else RobertaConfig
        return kind(type_vocab_size=shape.type_vocab, **usual, **size, **labels)
    tied = {"tie_word_embeddings": shape.tied_embeddings}
    if shape.family == "llama":
        heads = {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
        return LlamaConfig(**heads, **usual, **size, **labels, **tied)
    widths = {"n_embd": shape.hidden, "n_inner": shape.intermediate, "n_positions": shape.max_positions}
    return GPT2Config(vocab_size=shape.vocab, n_layer=shape.layers, n_head=shape.heads, **widths, **labels, **tied)


class _DropoutOnGPU(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x, self.p, True)[0] if self.p else x


class _LayerNormOnGPU(nn.LayerNorm):
    """CUDA's autocast runs LayerNorm in fp32, the CPU's does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


def _compute_as_on_gpus(network: nn.Module) -> None:
    for parent in network.modules():
        for name, child in list(parent.named_children()):
            if type(child) is nn.LayerNorm:
                child.__class__ = _LayerNormOnGPU
            elif isinstance(child, nn.Dropout | RowDropout):
                in_kernel = name in ("dropout", "attn_dropout") and type(parent).__name__.endswith("Attention")
                setattr(parent, name, _DropoutOnGPU(0.0 if in_kernel else child.p))


def _fused_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    # Fake tensors need no more than the shapes, and this kernel saves what those of GPUs save.
    causal = bool(getattr(module, "is_causal", False))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, 0.0, causal)[0].transpose(1, 2).contiguous(), None


def _no_draws(site: int, shape: torch.Size, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int16)


AttentionInterface.register(FUSED_ATTENTION, _fused_attention)
