"""Every ready configuration is read, names the command that starts it, and trains at a shrunken size."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import here, run_on_ranks
from training.config import parse_config
from training.run.trainer import Trainer

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = sorted((REPOSITORY / "training" / "configs").glob("*.yaml"))
IN_EVERY_RUN = {"laptop_cpu"}
MOST_RANKS = 8

# 57 training rows; what is for GPUs, or takes minutes, is off.
SMALL = (
    *("--model", "tiny", "--dataset", "sample", "--max_train_rows", "63", "--max_length", "32", "--epochs", "1"),
    *("--device", "cpu", "--precision", "fp32", "--compile", "false", "--log_every", "1"),
)


def _num_ranks(config: Path) -> int:
    """What the command in the file starts."""
    text = config.read_text()
    (per_machine,) = set(re.findall(r"(?:--nproc_per_node=|run_ddp\.sh )(\d+)", text))
    machines = re.findall(r"--nnodes=(\d+)", text)
    return int(per_machine) * int(machines[0] if machines else 1)


def _train(flags: list[str]) -> str:
    config = parse_config(flags, environment={})
    return str(Trainer(config, here()).fit())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_every_configuration_is_valid_and_documents_its_use_and_command(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    name = config.relative_to(REPOSITORY)
    parsed = parse_config(["--config", str(name)], environment={})
    comment = [line for line in config.read_text().splitlines() if line.startswith("#")]
    assert len(comment) >= 3
    for command in (line for line in comment if line.startswith("#   ")):
        assert re.search(rf"training/(train_ddp\.py|run_ddp\.sh \d+) --config {re.escape(str(name))}$", command)
    if parsed.deepspeed_config:
        assert json.loads(parsed.deepspeed_config.read_text())


@pytest.mark.parametrize(
    "config",
    [pytest.param(file, marks=() if file.stem in IN_EVERY_RUN else pytest.mark.slow, id=file.stem) for file in CONFIGS],
)
def test_trains_for_two_steps(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    parsed = parse_config(["--config", str(config)], environment={})
    if parsed.strategy == "deepspeed" and not find_spec("deepspeed"):
        pytest.skip('needs the extra: pip install "distrinews[deepspeed]"')
    asked, ranks = _num_ranks(config), min(_num_ranks(config), MOST_RANKS)
    copies = ranks // (max(1, parsed.tp) * max(1, parsed.pp))
    # A global batch of 32 is two steps of an epoch.
    rows = 32 // (copies * parsed.gradient_accumulation)
    shrunk = ["--dp_shard", str(parsed.dp_shard * ranks // asked)] if asked > ranks and parsed.dp_shard else []
    output = ["--output_dir", str(tmp_path / "out"), "--cache_dir", str(tmp_path / "cache")]
    if parsed.task == "pair":
        lines = "\n".join(f"text {number};text {number // 2};{number % 2}" for number in range(90))
        (tmp_path / "pairs.csv").write_text(f"text;text_pair;label\n{lines}")
        output += ["--dataset", str(tmp_path / "pairs.csv")]
    if parsed.task == "regression":  # the sample has names for labels
        lines = "\n".join(f"{'good ' * (number % 5)}text {number};{number % 5}" for number in range(90))
        (tmp_path / "numbers.csv").write_text(f"text;label\n{lines}")
        output += ["--dataset", str(tmp_path / "numbers.csv")]
    if parsed.distill:
        teacher = str(tmp_path / "teacher")
        asked = [*SMALL, "--cache_dir", str(tmp_path / "cache"), "--output_dir", teacher]
        run_on_ranks(1, _train, asked, seconds=500)
        output += ["--distill", teacher, "--model", teacher]
    folders = run_on_ranks(
        ranks, _train, ["--config", str(config), *SMALL, "--batch_size", str(rows), *shrunk, *output], seconds=500
    )
    assert folders == [str(tmp_path / "out")] * ranks
    assert (tmp_path / "out" / "model.safetensors").is_file()
    records = [json.loads(line) for line in (tmp_path / "out.run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    assert len(losses) == 2
    # A language model chooses among thousands of tokens.
    low, high = (6, 10) if parsed.is_language_model else (0.3, 3)
    assert all(low < loss < high for loss in losses)
