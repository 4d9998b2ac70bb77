"""NewsClassifier: a network from the hub with the head of its task, and a fast forward pass through
it.

Three things make it cheaper than calling the same network directly, with the same logits and
gradients: the last block computes a single token if the architecture is known (see
``architectures.py``), there is no attention mask if no row is padded, and four dropout draws come
from each random number (see ``dropout.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DistilBertConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from common.encoders import max_positions
from common.errors import ModelLoadError, UserError, first_line
from common.model_folder import SavedModel
from common.rows import AG_NEWS_LABELS
from common.weights import changes_nothing, read_weights
from common.windows import ATTENTION_KEY, WINDOWS_KEY, Windows
from training.config import model_place
from training.facts import TINY
from training.model.architectures import architecture_of, find_blocks, mask_of, token_types
from training.model.attention import ROW_ATTENTION
from training.model.dropout import RowDropout, use_row_dropout
from training.model.layers import FAMILY_OF, keep_blocks
from training.model.packing import Packing
from training.model.pooling import MEAN, POOLING_KEY, add_mean_block, can_have_mean_block
from training.model.precision import why_not_in_half
from training.model.weights import read_network, redraw, stored_dtype
from training.tasks import (
    TASK_OF_PROBLEM,
    CausalLanguageModel,
    Classification,
    MaskedLanguageModel,
    Task,
)

# A row is classified with and without this many padding tokens; its logits may differ by this share
# of their size.
PROBE_PADDING = 8
PROBE_TOLERANCE = 1e-3
LABEL_MAP = dict(enumerate(AG_NEWS_LABELS))
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Loading:
    """How a stored network is read, and what is changed about it.

    Attributes:
        revision: of a model on the hub; empty for the newest.
        as_stored: keep weights that are stored in half precision memory-mapped from their file. A
            strategy converts to fp32 only what a rank keeps (:func:`to_fp32`), so that not every
            rank of a machine holds the whole model.
        layers: how many of its blocks to keep; 0 for all.
        pooling: ``mean`` to let the head read the mean of all tokens, where that is possible.
    """

    revision: str = ""
    as_stored: bool = False
    layers: int = 0
    pooling: str = ""


AS_IT_IS = Loading()


class NewsClassifier(nn.Module):
    """A sequence classifier over any encoder that ``transformers`` can load.

    Args:
        pretrained_model: a hub name, a local folder, or ``tiny`` for a small DistilBERT with random
        weights.
        label_names: those of AG News by default, if there are four classes.
        vocab_size: used for ``tiny`` only.

    Raises:
        OSError, ValueError: the model cannot be found or read.
    """

    def __init__(
        self,
        num_labels: int = len(AG_NEWS_LABELS),
        pretrained_model: str = "distilbert-base-uncased",
        label_names: Sequence[str] | None = None,
        vocab_size: int = 8192,
        *,
        task: type[Task] = Classification,
        loading: Loading = AS_IT_IS,
    ) -> None:
        super().__init__()
        if label_names is None:
            label_names = [LABEL_MAP.get(i, str(i)) for i in range(num_labels)]
        names = list(label_names)
        network, self.notes, fresh = _load_network(
            pretrained_model, task, names, vocab_size, loading.revision or None
        )
        family = FAMILY_OF.get(type(network).__name__)
        # Whether the layer between the encoder and the last layer is one that was trained with the
        # encoder.
        self.has_stored_pooler = bool(
            family and family.pooler and f"{family.pooler}.weight" not in fresh
        )
        # The order matters: blocks are taken away before the one of the mean is added, and _adopt
        # comes last, since it makes the block that is then the last one compute a single token.
        if loading.layers:
            keep_blocks(network, loading.layers, pretrained_model)
        self.has_own_mean_block = getattr(network.config, POOLING_KEY, None) == MEAN
        if loading.pooling == MEAN and can_have_mean_block(network):
            add_mean_block(network)
        self._adopt(network, task(names))
        if not loading.as_stored:
            to_fp32(self)

    def set_dropout(self, share: float) -> bool:
        """Let all dropout layers leave out this share of the values; returns whether there are any."""
        layers = [module for module in self.network.modules() if isinstance(module, RowDropout)]
        for layer in layers:
            layer.p = share
        return bool(layers)

    @classmethod
    def from_saved(cls, saved: SavedModel) -> NewsClassifier:
        if saved.weights is None:
            what = "has only the exported artefact, without the trained weights (model.safetensors)"
            raise ModelLoadError(saved.path, what, "name the folder that training wrote")
        classifier = cls.__new__(cls)
        nn.Module.__init__(classifier)
        # Build the network without loading anything from its original place: the weights are in
        # `saved`.
        config = AutoConfig.for_model(**saved.config)
        # Whatever the weights were stored in when training began: CPUs compute halves slowly, and a
        # test is exact.
        network = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        weights = (
            read_weights(saved.weights) if isinstance(saved.weights, Path) else dict(saved.weights)
        )
        attention = weights.pop(ATTENTION_KEY, None)
        if (attention is None) != (saved.windows is None):
            what = (
                f"has one of {ATTENTION_KEY} in the weights and {WINDOWS_KEY} in config.json, but "
                "not both"
            )
            raise ModelLoadError(saved.path, what, "copy the files of the training run again")
        known = network.state_dict()
        unread = {name for name in weights if name not in known and changes_nothing(name, network)}
        network.load_state_dict(
            {name: value for name, value in weights.items() if name not in unread}
        )
        classifier._adopt(network, TASK_OF_PROBLEM[saved.problem_type.name](saved.labels))
        if saved.windows:
            classifier.widen_head(saved.windows, attention)
        return classifier

    @classmethod
    def around(cls, network: nn.Module, task: Task) -> NewsClassifier:
        """A classifier around any module that takes ids and mask, int64 (batch, seq), and returns
        scores.
        """
        classifier = cls.__new__(cls)
        nn.Module.__init__(classifier)
        if not isinstance(network, PreTrainedModel):
            network.config = PreTrainedConfig(
                id2label=dict(enumerate(task.label_names)),
                problem_type=task.problem_type.name,
                pad_token_id=0,
            )
            network.config.own_network = f"{type(network).__module__}:{type(network).__qualname__}"
        classifier._adopt(network, task)
        return classifier

    def widen_head(self, windows: Windows, row: torch.Tensor) -> None:
        """Give the last layer one more output, the attention of windows, and note how texts are
        cut.
        """
        head = self.network.get_submodule(windows.head)
        trained = head.weight.requires_grad
        head.weight = nn.Parameter(
            torch.cat([head.weight.detach(), row.to(head.weight)]), requires_grad=trained
        )
        if head.bias is not None:
            bias = torch.cat([head.bias.detach(), head.bias.new_zeros(1)])
            head.bias = nn.Parameter(bias, requires_grad=trained)
        head.out_features += 1
        self.network.config.update(windows.as_settings())

    def _adopt(self, network: nn.Module, task: Task) -> None:
        self.task = task
        self.network = network
        # Whether to compute real tokens only while training. DDP sets it, where it can; gradients
        # and dropout masks are those of padded rows.
        self.packs_rows = False
        self.dropout_stream = use_row_dropout(network)
        # Private attributes, because transformers 5 has no public way to ask which families take
        # attention and its masks from the registry. The others would add our boolean mask to their
        # scores.
        if isinstance(network, PreTrainedModel):
            network.config._attn_implementation = (
                ROW_ATTENTION if network._supports_sdpa else "eager"
            )
        if network.config.pad_token_id is None:
            # Some decoders name no padding id, and then accept batches of one row only.
            network.config.pad_token_id = 0
        self.architecture = architecture_of(network)
        if self.architecture:
            self.architecture.read_one_token(network)
        if isinstance(task, MaskedLanguageModel):
            self._predicted: torch.Tensor | None = None
            network.get_output_embeddings().register_forward_pre_hook(self._choose_predicted)

    def _choose_predicted(
        self, layer: nn.Module, states: tuple[torch.Tensor]
    ) -> tuple[torch.Tensor]:
        """Let the layer of the vocabulary compute predicted tokens only: (batch, seq, hidden) ->
        (tokens, hidden).
        """
        return states if self._predicted is None else (states[0][self._predicted],)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Logits of a batch: (batch, seq) -> (batch, num_labels), of a language model (batch, seq,
        vocabulary).

        The mask is 1 for a token and 0 for padding at the end of a row; None if nothing is padded.
        If rows are joined, it is on the CPU, whatever the device.
        """
        if self.architecture:
            self.dropout_stream.packing = self._packing(attention_mask, input_ids.device)
            if attention_mask is not None:
                attention_mask = attention_mask.to(input_ids.device)
            mask = self.dropout_stream.packing or attention_mask
            return self.architecture.logits(self.network, input_ids, mask)
        attention_mask = mask_of(input_ids, attention_mask)
        if isinstance(self.task, MaskedLanguageModel):
            # Marked by the task; a batch without marks, such as a probe, gets the scores of all its
            # tokens.
            is_marked = input_ids < 0
            self._predicted = is_marked if bool(is_marked.any()) else None
            input_ids = torch.where(is_marked, ~input_ids, input_ids)
        # Batches are padded with 0, but some encoders number positions by where their own padding
        # id is.
        input_ids = input_ids.masked_fill(attention_mask == 0, self.network.config.pad_token_id)
        if isinstance(self.network, PreTrainedModel):
            found = token_types(self.network, input_ids)
            more = {} if found is None else {"token_type_ids": found}
            if self.task.is_language_model and hasattr(self.config, "use_cache"):
                # Keys and values would be kept for a next token, which nobody asks for.
                more["use_cache"] = False
            return self.network(input_ids=input_ids, attention_mask=attention_mask, **more).logits
        return self.network(input_ids, attention_mask)

    def _packing(self, attention_mask: torch.Tensor | None, device: torch.device) -> Packing | None:
        """How to join the rows of a batch without padding; None if they stay padded."""
        may_pack = self.packs_rows and self.training
        if not may_pack or attention_mask is None or len(attention_mask) < 2:
            return None
        if not self.architecture.can_pack(self.network, device):
            return None
        return Packing(attention_mask, device)

    @torch.inference_mode()
    def predict(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """The most probable class of each row, int64 (batch,), without dropout whatever the
        module's mode.
        """
        was_training = self.training
        self.eval()
        try:
            return self(input_ids, attention_mask).argmax(dim=-1)
        finally:
            self.train(was_training)

    @property
    def label_names(self) -> list[str]:
        return self.task.label_names

    def get_label_name(self, label: int) -> str:
        return self.label_names[label]

    def seed_dropout(self, seed: int, step: int, first_row: int) -> None:
        """Make dropout a function of the seed, the step and the row's position in the global batch."""
        self.dropout_stream.move(seed, step, first_row)
        self.dropout_stream.seed_torch()

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return find_blocks(self.network)

    @property
    def head(self) -> str:
        """The name of the last layer, whose outputs are the scores; empty if it cannot be told."""
        if self.architecture:
            return self.architecture.family.classifier
        outputs = len(self.task.label_names) + hasattr(self.config, WINDOWS_KEY)
        layers = [
            name for name, module in self.network.named_modules() if isinstance(module, nn.Linear)
        ]
        return next(
            (
                name
                for name in reversed(layers)
                if self.network.get_submodule(name).out_features == outputs
            ),
            "",
        )

    @property
    def config(self) -> PreTrainedConfig:
        return self.network.config

    @property
    def max_positions(self) -> int:
        return max_positions(self.config.to_dict()) or 2**31


def try_unknown_family(model: NewsClassifier, flag: str, input_ids: torch.Tensor) -> list[str]:
    """Try a network of an unknown family on the CPU, before hours of training, and return the
    parameters it freezes.

    It freezes those that the output does not depend on, because DDP waits for the gradient of every
    trainable one. ``input_ids``, (1, seq), is a row short enough to be padded by
    :data:`PROBE_PADDING` tokens.

    Raises:
        UserError: padding changes its logits, or it fails.
    """
    if model.architecture:
        return []
    # In half precision, rounding alone would change the logits; and no strategy can shard such a
    # model.
    to_fp32(model)
    alone, padded = _alone_and_padded(model, flag, input_ids)
    change = (padded - alone.detach()).abs().max().item()
    scale = max(alone.abs().max().item(), 1e-6)
    if change > PROBE_TOLERANCE * scale:
        raise UserError(
            f"{flag}: {model.config.model_type or type(model.network).__name__} reads padding, "
            "which changes a row's "
            f"logits by {change / scale:.1%}, so a row's answer would depend on its batch; use "
            "BERT, RoBERTa or the "
            "like",
            code="padding-not-masked",
        )
    # DDP waits for the gradient of every parameter that requires one, and some would never get one.
    reached = _leaves(alone)
    unused = {
        name: parameter
        for name, parameter in model.network.named_parameters()
        if parameter not in reached
    }
    for parameter in unused.values():
        parameter.requires_grad_(False)
    return list(unused)


def _alone_and_padded(
    model: NewsClassifier, flag: str, input_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of a row without padding, with their autograd graph, and those of the same row
    with padding.
    """
    mask, was_training = torch.ones_like(input_ids), model.training
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            alone = model(input_ids, mask)
            with torch.no_grad():
                more = (0, PROBE_PADDING)
                padded = model(F.pad(input_ids, more), F.pad(mask, more))
                if model.task.is_language_model:
                    padded = padded[:, : input_ids.shape[1]]
                if isinstance(model.task, CausalLanguageModel):
                    _check_causal(model, flag, input_ids, alone)
    except UserError:
        raise
    except Exception as error:  # the network's own code
        raise UserError(
            f"{flag}: a text cannot be classified with it ({first_line(error)})",
            code="model-unreadable",
        ) from error
    finally:
        model.train(was_training)
    return alone, padded


def try_half_precision(model: NewsClassifier, input_ids: torch.Tensor) -> str:
    """Why a network of an unknown family cannot be computed in half precision; empty if it can be."""
    if model.architecture:
        return ""
    was_training = model.training
    model.eval()
    try:
        return why_not_in_half("cpu", lambda: model(input_ids, torch.ones_like(input_ids)))
    finally:
        model.train(was_training)


def _check_causal(
    model: NewsClassifier, flag: str, input_ids: torch.Tensor, scores: torch.Tensor
) -> None:
    """Refuse a network that sees the token which it should predict, such as an encoder with a
    decoder's head.
    """
    changed = input_ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % model.config.vocab_size
    before, after = scores[:, :-1], model(changed, torch.ones_like(changed))[:, :-1]
    if (after - before).abs().max() > PROBE_TOLERANCE * before.abs().max():
        raise UserError(
            f"{flag} and --task causal_lm: {model.config.model_type} reads the tokens that it "
            "should predict; use a "
            "decoder such as Llama or GPT-2, or --task masked_lm",
            code="model-not-causal",
        )


def _leaves(output: torch.Tensor) -> set[torch.Tensor]:
    """The parameters that a tensor was computed from: those a backward pass would reach, without
    its cost.
    """
    # Walk the autograd graph back from the output; its leaves are AccumulateGrad nodes, one for
    # each parameter.
    seen, found, look = set(), set(), [output.grad_fn]
    while look:
        node = look.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        look += [following for following, _ in node.next_functions]
    return found


def _load_network(
    name: str, task: type[Task], names: Sequence[str], vocab_size: int, revision: str | None
) -> tuple[PreTrainedModel, list[str], list[str]]:
    """The network, notes for the user, and the names of the weights that begin at random."""
    auto, about = getattr(transformers, task.auto_class), _settings_of_head(task, names)
    if name == TINY:
        network = auto.from_config(_tiny_config(task, vocab_size, about))
        return network, [], list(network.state_dict())
    source, asked = model_place(name), f"--model {name}"
    about |= {"revision": revision} if revision else {}
    generator, dtype = torch.get_rng_state(), stored_dtype(source, revision)
    reading, notes = read_network(auto, source, asked, dtype, **about)
    # Loading may have downloaded the model, or a newer version of it. Only now can its file say
    # what it holds, so it is read again, with the same draws for the new head.
    if (now := stored_dtype(source, revision)) != dtype:
        torch.set_rng_state(generator)
        reading, notes = read_network(auto, source, asked, now, **about)
    if reading.network.dtype != torch.float32:
        # The head is new. Draw it again as a model stored in fp32 would have drawn it.
        torch.set_rng_state(generator)
        redraw(reading.network, reading.fresh)
    if task.is_language_model and reading.fresh:
        notes.append(
            f"{asked} has no head for --task {task.name}: {len(reading.fresh)} weights begin at "
            "random, first "
            f"{reading.fresh[0]}"
        )
    return reading.network, notes, list(reading.fresh)


def _settings_of_head(task: type[Task], names: Sequence[str]) -> dict[str, Any]:
    """What config.json says of the head."""
    if task.is_language_model:  # which has the one over the vocabulary
        return {}
    settings = {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
    }
    # One label per text is what transformers assumes, so it is not written.
    if task is not Classification and task.has_labels:
        settings["problem_type"] = task.problem_type.name
    return settings


def _tiny_config(task: type[Task], vocab_size: int, about: dict[str, Any]) -> PreTrainedConfig:
    """For quick tries: an encoder, or for a task that reads from left to right a decoder."""
    if task is not CausalLanguageModel:
        return DistilBertConfig(
            vocab_size=vocab_size, dim=128, hidden_dim=512, n_layers=4, n_heads=4, **about
        )
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=8192,
        # As in SPECIAL_TOKENS.
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )


def to_fp32(module: nn.Module) -> None:
    """Convert weights in half precision to fp32, in which everything is trained."""
    if any(parameter.dtype in HALF for parameter in module.parameters()):
        module.float()


def to_fp32_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    inside = {module for block in blocks for module in block.modules()}
    for module in model.modules():
        if module not in inside and any(True for _ in module.parameters(recurse=False)):
            to_fp32(module)
