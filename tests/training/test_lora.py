"""LoRA: what is trained on any number of ranks, what a checkpoint holds, and that the written model is ordinary."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import UserError
from common.model_folder import read_saved_model
from tests.processes import here, run_on_ranks
from tests.training.parallelism.cases import ALONE
from tests.training.parallelism.small_models import small_batch, small_model
from tests.training.parallelism.small_runs import take_steps
from training.config import TrainConfig
from training.model.classifier import NewsClassifier
from training.model.lora import add_adapters, merge_adapters
from training.parallelism.registry import STRATEGIES
from training.tasks.classification import Classification

Train = Callable[..., int]
Metrics = Callable[..., list[dict[str, Any]]]
HEADS = {
    "distilbert": ("pre_classifier", "classifier"),
    "bert": ("bert.pooler", "classifier"),
    "llama": ("model.norm", "score"),
    "roberta": ("classifier",),
}


def adapted(
    family: str = "distilbert", dropout: float = 0.0, layers: int = 3, **fields: Any
) -> tuple[NewsClassifier, TrainConfig]:
    """A small model with adapters, and the configuration that asks for them."""
    model, config = small_model(family, dropout, layers=layers), TrainConfig(**{"lora": 4, **fields})
    add_adapters(model, config)
    return model, config


def train_on_this_rank(fields: dict[str, Any], steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a few steps and, on rank 0, the merged weights after them."""
    model, config = adapted(dropout=0.1, layers=4, deterministic=True, **fields)
    strategy = STRATEGIES[config.strategy](model, config, here(), "fp32")
    losses = take_steps(strategy, range(1, steps + 1), accumulation=config.gradient_accumulation)
    weights = strategy.full_weights()
    return losses, merge_adapters(weights, config) if here().is_first else {}


@pytest.fixture(scope="module")
def on_one_process() -> tuple[list[float], dict[str, torch.Tensor]]:
    return run_on_ranks(1, train_on_this_rank, {})[0]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"strategy": "ddp"}, marks=pytest.mark.slow),
        {"strategy": "zero3"},
        pytest.param({"strategy": "zero1"}, marks=pytest.mark.slow),
        pytest.param({"strategy": "zero2"}, marks=pytest.mark.slow),
        pytest.param({"strategy": "pp", "gradient_accumulation": 2}, marks=pytest.mark.slow),
        pytest.param({"strategy": "pp", "pp_schedule": "zbv", "gradient_accumulation": 4}, marks=pytest.mark.slow),
        pytest.param({"strategy": "ddp", "activation_checkpointing": "full"}, marks=pytest.mark.slow),
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_two_ranks_train_the_adapters_as_one_process_does(
    fields: dict[str, Any], on_one_process: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    expected_losses, expected = on_one_process
    losses, found = run_on_ranks(2, train_on_this_rank, fields)[0]

    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", HEADS)
def test_the_head_and_the_adapters_are_trained_and_nothing_else_changes(family: str) -> None:
    model, config = adapted(family)
    before = {name: tensor.clone() for name, tensor in model.network.state_dict().items()}
    strategy = STRATEGIES["ddp"](model, config, ALONE, "fp32")
    take_steps(strategy, [1, 2], ranks=ALONE)

    changed = {name for name, tensor in model.network.state_dict().items() if not tensor.equal(before[name])}
    adapters = {name for name in before if ".lora_" in name}
    head = {name for name in before if name.startswith(HEADS[family])}
    assert adapters
    assert changed == adapters | head


@pytest.mark.parametrize("family", HEADS)
def test_the_merged_model_answers_as_the_one_with_adapters(family: str) -> None:
    model, config = adapted(family, lora_alpha=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    ids, mask, _ = small_batch()
    plain = small_model(family).eval()
    plain.load_state_dict(merge_adapters(model.state_dict(), config))

    with torch.no_grad():
        unmerged, merged, base = model.eval()(ids, mask), plain(ids, mask), small_model(family).eval()(ids, mask)
    torch.testing.assert_close(merged, unmerged, rtol=1e-4, atol=1e-5)
    assert (unmerged - base).abs().max() > 0.05


def test_adapters_are_a_function_of_the_seed() -> None:
    def adapters(seed: int, drawn_before: int) -> torch.Tensor:
        model = small_model("bert")
        torch.rand(drawn_before)
        state = torch.get_rng_state()
        add_adapters(model, TrainConfig(lora=4, seed=seed))
        assert torch.get_rng_state().equal(state)
        return torch.cat([tensor.flatten() for name, tensor in model.named_parameters() if ".lora_" in name])

    assert adapters(1, drawn_before=0).equal(adapters(1, drawn_before=9))
    assert not adapters(1, drawn_before=0).equal(adapters(2, drawn_before=0))


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_weights_of_one_never_stopped_from_checkpoints_without_the_encoder(
    train_here: Train, metrics_of: Metrics, checkpoint_state: Callable[..., Any], tmp_path: Path
) -> None:
    flags = ("--lora", 4, "--batch_size", 8, "--save_every", 3, "--keep_last", 4, "--epochs", 1, "--output_dir")
    assert train_here(*flags, tmp_path / "whole") == 0
    assert train_here(*flags, tmp_path / "resumed") == 0
    last = tmp_path / "resumed.run" / "checkpoints" / "step_00000003"
    assert train_here(*flags, tmp_path / "resumed", "--resume", last) == 0

    losses = [[step["loss"] for step in metrics_of(tmp_path / f"{name}.run")] for name in ("whole", "resumed")]
    assert losses[0] == losses[1]
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "resumed")]
    assert files[0] == files[1]
    saved = {name for name in checkpoint_state(tmp_path / "whole.run", 3).tensors if name.startswith("model/")}
    assert all(".lora_" in name or "classifier" in name for name in saved)
    # An ordinary model folder, which transformers and the server read without peft.
    NewsClassifier.from_saved(read_saved_model(tmp_path / "whole"))
    assert not [name for name in load_file(tmp_path / "whole" / "model.safetensors") if "lora" in name]


@pytest.mark.slow
def test_a_run_does_not_resume_with_other_frozen_weights(
    train_here: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short = ("--batch_size", 29, "--epochs", 1, "--output_dir")
    assert train_here(*short, tmp_path / "base") == 0
    flags = ("--model", tmp_path / "base", "--lora", 2, *short, tmp_path / "tuned")
    assert train_here(*flags) == 0
    assert "0.04 M of them trained" in capfd.readouterr().out
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    weights["distilbert.transformer.layer.0.ffn.lin1.weight"][0, 0] += 1
    save_file(weights, file, metadata={"format": "pt"})

    assert train_here(*flags) == 2
    assert f"the weights of --model {tmp_path / 'base'} have changed" in capfd.readouterr().err


def test_without_peft_the_line_says_what_to_install(
    train_here: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)

    assert train_here("--lora", 4) == 2
    assert 'pip install "distrinews[lora]" [package-missing]' in capfd.readouterr().err


def test_a_network_of_ones_own_is_refused() -> None:
    model = NewsClassifier.around(torch.nn.EmbeddingBag(9, 2), Classification(["calm", "storm"]))

    with pytest.raises(UserError, match="--lora 4 and --network: only encoders of transformers"):
        add_adapters(model, TrainConfig(lora=4))
