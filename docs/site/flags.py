"""Write the table of PARALLELISM_STRATEGIES.md that shows which flags go together: python docs/site/flags.py"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from pathlib import Path
from typing import Any

from common.errors import UserError
from training.config import TrainConfig, flag_of
from training.facts import DEFAULT_TASK, STRATEGY_FACTS, TASK_FACTS

PAGE = Path(__file__).resolve().parents[1] / "PARALLELISM_STRATEGIES.md"
BEGIN, END = "<!-- flags: begin -->", "<!-- flags: end -->"

# Fields of the configuration, each with a value and what that needs beside it. Asked for one and for pairs of them, the
# configuration itself tells what goes together, so nothing here repeats its rules.
EXAMPLES: dict[str, dict[str, Any]] = {
    "balance": {"balance": "auto"},
    "batch_size": {"batch_size": "auto"},
    "budget": {"budget": "9m"},
    "check_gradient_sync": {"check_gradient_sync": 10},
    "class_weights": {"class_weights": "auto"},
    "compress": {"compress": "bf16"},
    "cpu_offload": {"cpu_offload": True},
    "deepspeed_config": {"deepspeed_config": "training/configs/deepspeed.json"},
    "deepspeed_stage": {"deepspeed_stage": 3},
    "deterministic": {"deterministic": True},
    "distill": {"distill": "teacher"},
    "distill_share": {"distill_share": 0.5, "distill": "teacher"},
    "distill_texts": {"distill_texts": "more.txt", "distill": "teacher"},
    "dp_shard": {"dp_shard": 1},
    "duplicates": {"duplicates": "drop"},
    "ema": {"ema": 0.9},
    "export": {"export": True},
    "float8": {"float8": True},
    "freeze": {"freeze": "2"},
    "from_model": {"from_model": "model", "dataset": "rows"},
    "label_column": {"label_column": "topic"},
    "label_smoothing": {"label_smoothing": 0.1},
    "labels": {"labels": "a,b", "dataset": "rows"},
    "learning_rate": {"learning_rate": 1e-4},
    "long": {"long": "windows"},
    "lora": {"lora": 8},
    "loss": {"loss": "my:loss"},
    "metric": {"metric": "my:metric"},
    "method": {"method": "head"},
    "network": {"network": "my:Net"},
    "pair_column": {"pair_column": "b"},
    "pp": {"pp": 2},
    "pp_schedule": {"pp_schedule": "gpipe"},
    "rough_share": {"rough_share": 1.0},
    "sampling": {"sampling": "balanced"},
    "schedule": {"schedule": "constant"},
    "sequence_parallel": {"sequence_parallel": True},
    "suspects": {"suspects": "drop"},
    "tp": {"tp": 2},
    "unlabelled": {"unlabelled": "texts.txt", "dataset": "rows"},
}
# With these values; others of the same flag go with more.
VALUES = {"balance", "batch_size", "long", "method", "sampling", "schedule", "suspects"}
WITH_LABELS = {name for name, facts in TASK_FACTS.items() if facts.has_labels}
Setting = tuple[str, str]  # a strategy and a task
SETTINGS = list(product(STRATEGY_FACTS, sorted(TASK_FACTS, key=lambda task: task != DEFAULT_TASK)))


def goes(fields: dict[str, Any], setting: Setting) -> bool:
    """Whether the configuration takes these fields under a strategy and a task."""
    strategy, task = setting
    facts = STRATEGY_FACTS[strategy]
    if "network" in fields and (facts.tensor or facts.pipeline):
        return False  # found out when the network is there: only known families can be split
    teacher = {"distill": "teacher"} if TASK_FACTS[task].needs_teacher else {}
    try:
        TrainConfig(**{"strategy": strategy, "task": task, **teacher, **fields})
    except UserError as error:
        if error.code != "flags-conflict":
            raise
        return False
    return True


def table() -> str:
    """Markdown: a row for each flag that some strategy, task or other flag rules out."""
    found = {name: [one for one in SETTINGS if goes(fields, one)] for name, fields in EXAMPLES.items()}
    apart: dict[str, list[str]] = {name: [] for name in EXAMPLES}
    for one, other in combinations(EXAMPLES, 2):
        setting = next((setting for setting in found[one] if setting in found[other]), None)
        if setting and not goes(EXAMPLES[one] | EXAMPLES[other], setting):
            apart[one].append(_shown(other))
            apart[other].append(_shown(one))
    lines = ["| flag | strategies | tasks | not with |", "| --- | --- | --- | --- |"]
    for name in EXAMPLES:
        strategies, tasks = ({setting[side] for setting in found[name]} for side in (0, 1))
        cells = (_names(strategies, STRATEGY_FACTS), _names(tasks, TASK_FACTS), ", ".join(apart[name]))
        if cells != ("all", "all", ""):
            lines.append(f"| {_shown(name)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(name: str) -> str:
    return f"`{flag_of(name)}{' ' * (name in VALUES)}{EXAMPLES[name][name] if name in VALUES else ''}`"


def _names(found: set[str], all_names: Iterable[str]) -> str:
    if found == WITH_LABELS:
        return "with labels"
    missing = [name for name in all_names if name not in found]
    if not missing:
        return "all"
    if len(missing) < 3:
        return "all but " + ", ".join(f"`{name}`" for name in missing)
    return ", ".join(f"`{name}`" for name in all_names if name in found)


def page_with_table() -> str:
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{table()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table())
