"""Flags that do not go together: each rule is about flags that exist, gives advice, and applies to its example."""

from __future__ import annotations

import re
import shlex
from typing import get_args

import pytest

from common.errors import UserError
from training.config import TrainConfig, flag_of, parse_config
from training.conflicts import CONFLICTS
from training.facts import FLAGS_OF_STRATEGIES, FLAGS_OF_TASKS, STRATEGY_FACTS, TASK_FACTS
from training.parallelism.registry import STRATEGIES
from training.tasks import TASKS

NO_HEAD = (
    *("--task masked_lm", "--model tiny", "--network my:Net", "--lora 4", "--budget 60s", "--loss my:loss"),
    "--long windows",
)
# Flags, and the beginning of the line that refuses them.
EXAMPLES = {
    "--precision fp16 --device cpu": "--precision fp16 and --device cpu: fp16 trains on GPUs only",
    "--train_split a --validation_split a": "--train_split a and --validation_split a: must be two",
    "--train_split a --test_split a": "--train_split a and --test_split a: must be two",
    "--validation_split a --test_split a": "--validation_split a and --test_split a: must be two",
    "--task embedding": "--task embedding: give the encoder whose vectors are to be learned",
    "--tf32 --device cpu": "--tf32 and --device cpu: only GPUs have TF32",
    "--loss my:loss --label_smoothing 0.1": "--loss my:loss and --label_smoothing 0.1: your own loss",
    "--class_weights auto --sampling balanced": "--class_weights auto and --sampling balanced: rare labels",
    "--lora_alpha 8": "--lora_alpha 8: does nothing without --lora",
    "--metrics_host 0.0.0.0": "--metrics_host 0.0.0.0: does nothing without --metrics_port",
    "--lora 8 --strategy tp": "--lora 8 and --strategy tp: adapters train under ddp",
    "--lora 8 --strategy deepspeed": "--lora 8 and --strategy deepspeed: adapters train under ddp",
    "--lora 8 --strategy 3d --tp 2": "--lora 8 and --tp 2: adapters train under ddp",
    "--lora 8 --freeze 2": "--lora 8 and --freeze 2: adapters freeze the whole encoder",
    "--lora 8 --float8": "--lora 8 and --float8: adapters are too narrow",
    "--layers 2 --model tiny": "--layers 2 and --model tiny: its blocks are random",
    "--distill_texts more.txt": "--distill_texts more.txt: does nothing without --distill",
    "--distill_share 0.5": "--distill_share 0.5: does nothing without --distill",
    "--distill a,b --task embedding": "--distill a,b: vectors of different encoders have no useful mean",
    "--distill a --distill_share 1 --label_smoothing 0.1": "--distill_share 1 and --label_smoothing 0.1: the labels",
    "--distill a --distill_texts b --class_weights auto": "--distill_texts b and --class_weights auto: this needs",
    "--distill a --distill_texts b --sampling balanced": "--distill_texts b and --sampling balanced: this needs",
    "--distill a --distill_texts b --suspects list": "--distill_texts b and --suspects list: this needs",
    "--dataset=": "--dataset: names no data; without labelled rows give --labels",
    "--labels a,b --method fine_tune": "--method fine_tune and --labels without --dataset: there are no rows",
    "--unlabelled a --dataset b --distill c --distill_texts d": "--unlabelled and --distill_texts: the head",
    "--unlabelled a --dataset b --learning_rate 1e-3": "--unlabelled a and --learning_rate 0.001: with a rate of",
    "--from a --model starter --dataset b": "--from a and --model starter: two models to begin with",
    "--from a --dataset b --labels c,d": "--from a and --labels c,d: do not go together",
    "--from a --dataset b --unlabelled c": "--from a and --unlabelled c: do not go together",
    "--from a --dataset b --distill c": "--from a and --distill c: do not go together",
    "--from a": "--from a: give the rows that it shall learn, with --dataset",
    **{f"--method head {flag}": f"--method head and {flag}: no head can be fitted here" for flag in NO_HEAD},
    **{f"--unlabelled a --dataset b {flag}": f"--unlabelled a and {flag}: no head can be" for flag in NO_HEAD},
    **{f"--from a --dataset b {flag}": f"--from a and {flag}: no head" for flag in NO_HEAD if "model" not in flag},
    "--from tiny --dataset b": "--from tiny and --model tiny: no head can be fitted here",
    "--long windows --network my:Net": "--long windows and --network my:Net: windows are pooled by a row",
    "--long windows --task regression --pair_column b": "--long windows and --pair_column b: windows are cut from",
    "--long windows --batch_size auto": "--long windows and --batch_size auto: rows have different numbers",
    "--batch_size auto --strategy pp": "--batch_size auto and --strategy pp: sizes are tried under ddp",
    "--batch_size auto --deterministic": "--batch_size auto and --deterministic: a measured size is not",
    "--batch_size auto --balance auto": "--batch_size auto and --balance auto: faster ranks would get more",
    "--budget 9m --suspects drop": "--budget 9m and --suspects drop: a run with a budget may end",
    "--budget 9m --deterministic": "--budget and --deterministic: how many steps fit into a time is not",
    "--budget 9m --schedule constant": "--budget 9m and --schedule constant: the learning rate must end at zero",
    "--suspects drop --epochs 1": "--suspects drop and --epochs 1: this takes effect from the second epoch on",
    "--balance auto --deterministic": "--balance auto and --deterministic: shares by measured speeds",
    # What a task or a strategy has no use for.
    "--task causal_lm --label_column topic": "--label_column topic: does nothing with --task causal_lm, only with",
    "--task regression --label_smoothing 0.1": "--label_smoothing 0.1: does nothing with --task regression, only",
    "--from a --dataset b --task multi_label": "--from a: does nothing with --task multi_label, only with",
    "--long windows --strategy pp": "--long windows: does nothing with --strategy pp, only with ddp, zero1",
    "--long windows --task pair": "--long windows: does nothing with --task pair, only with classification",
    "--freeze 2 --strategy deepspeed": "--freeze 2: does nothing with --strategy deepspeed, only with ddp",
    "--best_metric rmse": "--best_metric rmse and --task classification: this task has accuracy, macro_f1, loss",
    "--task causal_lm --best_metric accuracy": "--best_metric accuracy and --task causal_lm: this task has perplexity",
}
ADVICE = re.compile(
    r"(; (drop one|use .+|leave .+|give a number|raise --\w+|add --.+|for --task \w+ name one|without labelled rows .+)"
    r"|: (give .+, with --.+|does nothing without --\w+|must be two .+|adapters train under .+|there are no rows .+))$"
)


def _refusal(flags: str) -> str:
    with pytest.raises(UserError) as refused:
        parse_config(shlex.split(flags), {})
    assert refused.value.code == "flags-conflict"
    return str(refused.value)


@pytest.mark.parametrize("flags", EXAMPLES)
def test_flags_that_do_not_go_together_are_refused_in_one_line(flags: str) -> None:
    line = _refusal(flags)

    assert line.startswith(EXAMPLES[flags])
    assert "\n" not in line


def test_each_rule_is_about_flags_that_exist_gives_advice_and_has_an_example() -> None:
    lines = [_refusal(flags) for flags in EXAMPLES]
    for _, message in CONFLICTS:
        named = {flag_of(name) for name in re.findall(r"{(\w+)}", message)} | set(re.findall(r"--\w+", message))
        assert named <= {flag_of(name) for name in TrainConfig.model_fields}
        assert ADVICE.search(message), message
        pattern = re.sub(r"\\{(\w+)\\}", lambda name: rf"{flag_of(name[1])}( \S+)?", re.escape(message))
        assert any(re.fullmatch(pattern, line) for line in lines), message


def test_the_facts_are_about_flags_tasks_and_strategies_that_exist() -> None:
    assert TASKS.keys() == TASK_FACTS.keys()
    assert STRATEGIES.keys() == STRATEGY_FACTS.keys()
    assert {*FLAGS_OF_TASKS, *FLAGS_OF_STRATEGIES} <= TrainConfig.model_fields.keys()
    for table, choice in ((FLAGS_OF_TASKS, "task"), (FLAGS_OF_STRATEGIES, "strategy")):
        names = get_args(TrainConfig.model_fields[choice].annotation)
        assert {name for wanted in table.values() for name in wanted} <= {*names}
