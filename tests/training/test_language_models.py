"""Language models: plain text in blocks, the same run on any number of ranks and in any layout, what is written."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from common.errors import ModelLoadError, UserError
from common.model_folder import read_saved_model
from common.seen_texts import SeenTexts
from tests.deployment.documented import REPOSITORY, documented
from training.data.tokenized import Blocks, load_tokenizer
from training.model.classifier import NewsClassifier, try_unknown_family
from training.quiet import quiet_libraries
from training.tasks import CausalLanguageModel, MaskedLanguageModel, Vocabulary

Train = Callable[..., int]
Metrics = Callable[..., list[dict[str, Any]]]
TASKS = ("causal_lm", "masked_lm")
LAYOUTS = {
    "ddp": (2,),
    "zero2": (2, "--strategy", "zero2"),
    "zero3": (2, "--strategy", "zero3"),
    "deepspeed": (2, "--strategy", "deepspeed", "--deepspeed_stage", 3),
    "tp": (2, "--strategy", "tp", "--sequence_parallel"),
    "pp": (2, "--strategy", "pp", "--gradient_accumulation", 2),
    "zbv": (2, "--strategy", "pp", "--pp_schedule", "zbv", "--gradient_accumulation", 4),
    "3d": (8, "--strategy", "3d", "--pp", 2, "--tp", 2, "--gradient_accumulation", 2),
}
# The head of an encoder's language model is its embedding table, which stages and splits cannot share.
CASES = [
    *(("causal_lm", layout) for layout in LAYOUTS),
    *(("masked_lm", layout) for layout in ("ddp", "zero2", "zero3", "deepspeed")),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one file of training texts and one of test texts, each line a text."""
    folder = tmp_path_factory.mktemp("text")
    words = ("sea", "storm", "sun", "sand", "wind")
    for split, count in (("train", 120), ("test", 30)):
        lines = [f"{split} {i}: {' and '.join(words[: 1 + i % len(words)])} at noon" for i in range(count)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n\n")
    return folder


def _flags(task: str, text: Path, output: Path) -> tuple[object, ...]:
    flags = ("--task", task, "--dataset", text, "--output_dir", output, "--max_length", 16, "--model", "tiny")
    return (*flags, "--save_every", 4, "--keep_last", 9, "--epochs", 1)


@pytest.fixture(scope="module")
def alone(text: Path, launch_shared: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model of each task, trained by one process."""
    models = {}
    for task in TASKS:
        models[task] = tmp_path_factory.mktemp("alone") / task
        ended = launch_shared(1, *_flags(task, text, models[task]), "--batch_size", 8)
        assert ended.process.returncode == 0, ended.err
    return models


def _losses(metrics_of: Metrics, output: Path) -> list[float]:
    run = output.with_name(f"{output.name}.run")
    return [step["loss"] for step in metrics_of(run)] + [
        epoch["validation"]["loss"] for epoch in metrics_of(run, "epoch")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "layout"),
    CASES,
)
def test_every_layout_trains_a_language_model_as_one_process_does(
    task: str,
    layout: str,
    text: Path,
    alone: dict[str, Path],
    launch: Callable[..., Any],
    metrics_of: Metrics,
    tmp_path: Path,
) -> None:
    if layout == "deepspeed":
        pytest.importorskip("deepspeed", reason="DeepSpeed is an extra")
    world_size, *flags = LAYOUTS[layout]
    shares = {"tp": 1, "pp": 1, "zbv": 1}.get(layout, 2)
    accumulation = int(flags[flags.index("--gradient_accumulation") + 1]) if "--gradient_accumulation" in flags else 1
    size = 8 // shares // accumulation
    ended = launch(world_size, *_flags(task, text, tmp_path / "model"), *flags, "--batch_size", size)

    assert ended.process.returncode == 0, ended.err
    assert _losses(metrics_of, tmp_path / "model") == pytest.approx(_losses(metrics_of, alone[task]), rel=1e-4)
    tests = [json.loads((model / "metrics.json").read_text())["test"] for model in (tmp_path / "model", alone[task])]
    assert tests[0]["perplexity"] == pytest.approx(tests[1]["perplexity"], rel=1e-3)


@pytest.mark.parametrize("task", ["masked_lm", pytest.param("causal_lm", marks=pytest.mark.slow)])
def test_a_run_resumes_exactly(
    task: str, text: Path, alone: dict[str, Path], train_here: Train, metrics_of: Metrics, tmp_path: Path
) -> None:
    shutil.copytree(alone[task].with_name(f"{task}.run"), tmp_path / "model.run")
    checkpoint = tmp_path / "model.run" / "checkpoints" / "step_00000004"
    assert train_here(*_flags(task, text, tmp_path / "model"), "--batch_size", 8, "--resume", checkpoint) == 0

    assert _losses(metrics_of, tmp_path / "model") == _losses(metrics_of, alone[task])
    weights, again = (load_file(model / "model.safetensors") for model in (alone[task], tmp_path / "model"))
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_transformers_finds_the_same_perplexity_in_the_written_causal_model(alone: dict[str, Path], text: Path) -> None:
    quiet_libraries()
    tokenizer = AutoTokenizer.from_pretrained(alone["causal_lm"])
    model = AutoModelForCausalLM.from_pretrained(alone["causal_lm"]).eval()
    lines = (text / "test.txt").read_text().split("\n")
    ids = [token for line in lines if line for token in tokenizer(line)["input_ids"]]
    losses, count = 0.0, 0
    for start in range(0, len(ids), 16):
        block = torch.tensor([ids[start : start + 16]])
        if block.shape[1] > 1:
            with torch.no_grad():
                losses += float(model(block, labels=block).loss) * (block.shape[1] - 1)
            count += block.shape[1] - 1

    test = json.loads((alone["causal_lm"] / "metrics.json").read_text())["test"]
    assert test["tokens"] == count
    assert test["perplexity"] == pytest.approx(math.exp(losses / count), rel=1e-4)
    written = model.generate(torch.tensor([ids[:4]]), max_new_tokens=4, do_sample=False)
    assert written.shape[1] > 4


def test_an_adapted_encoder_can_be_trained_to_classify(
    alone: dict[str, Path], train_here: Train, tmp_path: Path
) -> None:
    quiet_libraries()
    encoder = AutoModelForMaskedLM.from_pretrained(alone["masked_lm"]).state_dict()
    rows = [json.dumps({"text": f"train {i}: sea and sun", "label": "ab"[i % 2]}) for i in range(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))

    flags = ("--model", alone["masked_lm"], "--dataset", tmp_path, "--output_dir", tmp_path / "out", "--epochs", 1)
    assert train_here(*flags, "--max_length", 16, "--learning_rate", 1e-9, "--weight_decay", 0) == 0
    trained = load_file(tmp_path / "out" / "model.safetensors")
    name = "distilbert.transformer.layer.0.attention.q_lin.weight"
    torch.testing.assert_close(trained[name], encoder[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_a_server_refuses_a_language_model_in_one_line(task: str, alone: dict[str, Path]) -> None:
    with pytest.raises(ModelLoadError, match="a language model, which does not label texts"):
        read_saved_model(alone[task])


@pytest.mark.parametrize("task", TASKS)
def test_a_language_model_keeps_no_hashes_of_its_texts(task: str, alone: dict[str, Path]) -> None:
    assert SeenTexts.read(alone[task]) is None


@pytest.mark.parametrize("task", TASKS)
def test_report_and_card_show_the_perplexity(task: str, alone: dict[str, Path]) -> None:
    report = alone[task].with_name(f"{task}.run").joinpath("report.html").read_text()
    card = (alone[task] / "README.md").read_text()

    for words in ("Test perplexity", "Tokens right", "blocks of 16 tokens"):
        assert words in report, words
    assert {"causal_lm": "text-generation", "masked_lm": "fill-mask"}[task] in card
    assert "perplexity" in card
    assert not alone[task].with_suffix(".pt").exists()
    assert not alone[task].with_name(f"{task}.run").joinpath("predictions.csv").exists()


def test_adapters_of_a_causal_model_leave_its_head_as_it_is_and_are_merged_when_it_is_written(
    alone: dict[str, Path], text: Path, train_here: Train, tmp_path: Path
) -> None:
    flags = (*_flags("causal_lm", text, tmp_path / "model"), "--model", alone["causal_lm"], "--lora", 4)
    assert train_here(*flags, "--batch_size", 8) == 0

    before, after = (load_file(model / "model.safetensors") for model in (alone["causal_lm"], tmp_path / "model"))
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".layers." in name and name.endswith("_proj.weight")}


def test_blocks_hold_all_tokens_but_a_last_single_one() -> None:
    blocks = Blocks(4, end=3)

    assert blocks.offsets(8).tolist() == [0, 4, 8]
    assert blocks.offsets(10).tolist() == [0, 4, 8, 10]
    assert blocks.offsets(9).tolist() == [0, 4, 8]


def test_a_causal_model_predicts_the_next_token_and_no_padding() -> None:
    ids, mask = torch.tensor([[5, 6, 7, 8], [9, 4, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    task = CausalLanguageModel([])

    inputs, targets = task.inputs_and_targets(ids, mask, torch.zeros(2), np.arange(2), (1,))

    assert inputs is ids
    assert targets.tolist() == [[6, 7, 8, -100], [4, -100, -100, -100]]
    assert task.predicted(np.array([4, 2])).tolist() == (targets != -100).sum(dim=1).tolist()


def test_the_scores_of_predicted_tokens_are_those_of_the_whole_network() -> None:
    torch.manual_seed(0)
    network = BertForMaskedLM(BertConfig(vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=2))
    model = NewsClassifier.around(network, MaskedLanguageModel([])).eval()
    model.task.vocabulary = Vocabulary(size=90, special=(2, 3), mask=4, end=3)
    ids = torch.from_numpy(np.random.default_rng(0).integers(10, 90, (4, 20)))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    marked, targets = model.task.inputs_and_targets(ids * mask, mask, torch.zeros(4), np.arange(4), (1,))

    with torch.inference_mode():
        few = model(marked, mask)
        whole = model(torch.where(marked < 0, ~marked, marked), mask)  # without marks
    assert torch.allclose(few, whole[targets != -100], atol=1e-5)
    loss = model.task.row_losses(few, targets, 0.0)
    expected = torch.nn.functional.cross_entropy(whole.transpose(1, 2), targets, reduction="none").sum(dim=1)
    assert torch.allclose(loss, expected / (targets != -100).sum(dim=1), atol=1e-5)


def test_what_is_hidden_depends_on_the_step_and_the_row_and_not_on_its_batch() -> None:
    task = MaskedLanguageModel([])
    task.vocabulary = Vocabulary(size=1000, special=(2, 3), mask=4, end=3)
    ids = torch.from_numpy(np.random.default_rng(0).integers(10, 1000, (8, 400)))
    ids[:, 0] = 2
    labels, rows = torch.zeros(8), np.arange(8)

    inputs, targets = task.inputs_and_targets(ids, None, labels, rows, (1, 4, 7))
    alone, alone_targets = task.inputs_and_targets(ids[5:6], None, labels[:1], rows[5:6], (1, 4, 7))
    other, _ = task.inputs_and_targets(ids, None, labels, rows, (1, 4, 8))

    assert torch.equal(inputs[5:6], alone)
    assert torch.equal(targets[5:6], alone_targets)
    assert not torch.equal(inputs, other)
    predicted = targets != -100
    assert predicted.sum(dim=1).tolist() == task.predicted(np.full(8, 400)).tolist() == [60] * 8
    assert not predicted[:, 0].any()  # special tokens stay
    assert torch.equal(targets[predicted], ids[predicted])
    assert torch.equal(inputs[~predicted], ids[~predicted])
    assert torch.equal(inputs < 0, predicted)  # which marks them
    shares = [(~inputs[predicted] == value).float().mean().item() for value in (4, ids[predicted])]
    assert shares == [pytest.approx(0.8, abs=0.06), pytest.approx(0.1, abs=0.05)]


def test_a_network_that_sees_what_it_should_predict_is_refused() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = BertLMHeadModel(BertConfig(**sizes, intermediate_size=32, initializer_range=1.0))
    model = NewsClassifier.around(encoder, CausalLanguageModel([]))

    with pytest.raises(UserError, match="bert reads the tokens that it should predict"):
        try_unknown_family(model, "--model x", torch.tensor([[5, 9, 11, 13, 7]]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adapt", "language-model"])
def test_the_documented_commands_train(name: str, text: Path, launch: Callable[..., Any], tmp_path: Path) -> None:
    """Except that models are tiny and blocks short."""
    (tmp_path / "training").symlink_to(REPOSITORY / "training")
    (tmp_path / "mails.txt").write_bytes((text / "train.txt").read_bytes())
    rows = [f"{('storm', 'sand')[i % 2]}s and wind at {i % 12},{'ab'[i % 2]}" for i in range(40)]
    (tmp_path / "my_rows.csv").write_text("\n".join(["text,label", *rows]))
    commands = documented("docs/tasks.md", name).strip().split("\n")
    for number, command in enumerate(commands):
        words = shlex.split(command)
        first = next(place for place, word in enumerate(words) if word.startswith("--"))
        flags = [*words[first:], "--max_length", "16", "--epochs", "1"]
        tiny = [] if number else ["--model", "tiny"]
        ended = launch(2 if "run_ddp.sh 2 " in command else 1, *flags, *tiny, cwd=tmp_path)
        assert ended.process.returncode == 0, ended.err
    assert len(list((tmp_path / "checkpoints").glob("*/model.safetensors"))) == len(commands)


@pytest.mark.parametrize("strategy", ["tp", pytest.param("pp", marks=pytest.mark.slow)])
def test_a_model_whose_head_is_its_embedding_table_is_not_split(
    strategy: str, text: Path, launch: Callable[..., Any], tmp_path: Path
) -> None:
    quiet_libraries()
    tokenizer = load_tokenizer("tiny", ["train 0123456789: sea and storm and sun and sand and wind at noon"], 16)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")
    tokenizer.save_pretrained(tmp_path / "tied")
    flags = (*_flags("causal_lm", text, tmp_path / "model"), "--model", tmp_path / "tied", "--strategy", strategy)
    ended = launch(2, *flags, "--gradient_accumulation", 2, "--batch_size", 4)

    assert ended.process.returncode != 0
    assert "is also its embedding table" in ended.err
