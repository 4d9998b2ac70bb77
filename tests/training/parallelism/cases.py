"""The equivalence suite's cases: a layout, a model, a way to cut the batch; and what a case finds on its ranks."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from tests.processes import here
from tests.training.parallelism.saved_states import whole_state
from tests.training.parallelism.small_models import LABELS, small_batch, small_config, small_model
from tests.training.parallelism.small_runs import take_steps
from training.checkpointing import FinishedModel, write_model
from training.config import TrainConfig
from training.distributed.ranks import Ranks
from training.parallelism.registry import STRATEGIES
from training.parallelism.strategy import Strategy

STEPS = (1, 2, 3, 4)
ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")
DROPOUT = {"distilbert": 0.1, "bert": 0.1, "llama": 0.0}
SPREAD = 0.02  # of weights, as encoders begin with: with far larger ones rounding grows from block to block
METRICS = {"best_epoch": 1, "base_model": "small", "max_length": 40, "dataset": "small", "train_rows": 30}


@dataclass(frozen=True)
class Case:
    """One layout of one model. ``fields``: of the configuration; ``layers``: blocks of the model."""

    world_size: int
    fields: dict[str, Any]
    family: str = "distilbert"
    accumulation: int = 1
    precision: str = "fp32"
    layers: int = 4
    dropout: bool = True

    def __str__(self) -> str:
        flags = " ".join(f"--{name} {value}" for name, value in self.fields.items())
        return f"{self.world_size} ranks, {flags}, {self.family}, accumulation {self.accumulation}, {self.precision}"

    def strategy(self, ranks: Ranks, dtype: torch.dtype = torch.float32, **fields: Any) -> Strategy:
        """The model of the case, its weights in ``dtype``, laid over ``ranks``."""
        rate = DROPOUT[self.family] if self.dropout else 0.0
        model = small_model(self.family, rate, dtype, self.layers, SPREAD)
        chosen = {"gradient_accumulation": self.accumulation, "max_length": 48, **fields}
        config = TrainConfig(deterministic=self.precision == "fp32", **chosen)
        return STRATEGIES[config.strategy](model, config, ranks, self.precision)


@dataclass(frozen=True)
class Differences:
    """From one process, relative to its norm or value; the greatest where there are several."""

    loss: float
    gradients: float
    weights: float
    grad_norm: float
    evaluation: float


def compare(case: Case, device: str = "cpu") -> Differences | None:
    """Train as the case says on a device and as one process does on the CPU, and compare.

    Called on every rank, answered on rank 0.

    The one process computes in fp64: in fp32 its own rounding would be as large as the differences that are looked for.

    Raises:
        AssertionError: the written model is not what `from_pretrained` reads.
    """
    ranks = here(device)
    found, expected = _train(case, case.strategy(ranks, **case.fields), ranks), None
    if ranks.is_first:
        dtype = torch.float64 if case.precision == "fp32" else torch.float32
        expected = _train(case, case.strategy(ALONE, dtype), ALONE)
        _assert_written_whole(case, found["weights"])
    if expected is None:
        return None
    return Differences(
        loss=max(abs(a / b - 1) for a, b in zip(found["losses"], expected["losses"], strict=True)),
        gradients=_distance(found["gradients"], expected["gradients"]),
        weights=_distance(*(_without_key_biases(weights) for weights in (found["weights"], expected["weights"]))),
        grad_norm=abs(found["grad_norm"] / expected["grad_norm"] - 1),
        evaluation=_distance({"": found["logits"]}, {"": expected["logits"]}),
    )


def _train(case: Case, strategy: Strategy, ranks: Ranks) -> dict[str, Any]:
    norms: list[torch.Tensor] = []
    losses = take_steps(strategy, STEPS[:1], accumulation=case.accumulation, ranks=ranks, norms=norms)
    # AdamW's first moment after its first step is a tenth of the clipped gradient.
    gradients = whole_state(strategy, ranks).moments("exp_avg")
    losses += take_steps(strategy, STEPS[1:], accumulation=case.accumulation, ranks=ranks)
    ids, mask, _ = small_batch()
    return {
        "losses": losses,
        "gradients": gradients,
        "grad_norm": norms[0].item(),
        "weights": {name: tensor for name, tensor in strategy.full_weights().items() if tensor is not None},
        "logits": strategy.logits(ids.to(ranks.device), mask.to(ranks.device), case.precision).cpu(),
    }


def _without_key_biases(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Softmax forgets them: their gradient is nothing but rounding, which AdamW makes whole steps of."""
    return {name: tensor for name, tensor in weights.items() if not name.endswith(("k_lin.bias", "key.bias"))}


def _distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of everything, in parts of the norm of what is expected."""
    assert found.keys() == expected.keys()
    difference = nn.utils.get_total_norm([(found[name] - expected[name]).double() for name in expected])
    return (difference / nn.utils.get_total_norm([tensor.double() for tensor in expected.values()])).item()


def _assert_written_whole(case: Case, weights: dict[str, torch.Tensor]) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"news": 0}, unk_token="news")))
    scores = {"rows": 1, "loss": 1.0, "accuracy": 1.0, "macro_f1": 1.0, "calibration_error": 0.0}
    per_class = {name: {"precision": 1.0, "recall": 1.0, "f1": 1.0, "rows": 1} for name in LABELS}
    metrics = METRICS | {"test": scores | {"labels": LABELS, "per_class": per_class}}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "model"
        config = small_config(case.family, DROPOUT[case.family] if case.dropout else 0.0, case.layers)
        write_model(FinishedModel(config, weights, tokenizer, metrics, {"text_cleaning": "news"}), target)
        read = AutoModelForSequenceClassification.from_pretrained(target).state_dict()
    assert {f"network.{name}" for name in read} == weights.keys()
    for name, tensor in read.items():
        assert torch.equal(tensor, weights[f"network.{name}"]), name
