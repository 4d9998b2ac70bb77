"""The planner's command: its answers, what it prints and writes, and its errors."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import UserError
from tests.deployment.documented import documented
from tests.docs.pages import shown_after
from training.planning import tables
from training.planning.__main__ import ask, ask_for_largest, main
from training.planning.largest import LargestAnswer, scaled
from training.planning.memory import host_memory
from training.planning.models import NAMED_SHAPES
from training.planning.plan import Answer, best_plans, no_layout_fits
from training.planning.tables import as_record, print_answer, print_largest

PAGE = "docs/PLANNING.md"
QUESTION = ("--model", "llama-13b", "--gpus", "32", "--nodes", "4", "--gpu", "a100-80gb")
SMALL = ("--model", "distilbert-base", "--gpus", "2", "--gpu", "t4-16gb")

Printed = Callable[[Answer], str]


@pytest.fixture(scope="module")
def founding() -> Answer:
    """The answer to the question that docs/PLANNING.md asks."""
    return ask(flags_of("founding"))


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    def printed(answer: Answer) -> str:
        print_answer(answer, details=True)
        return capsys.readouterr().out

    return printed


def flags_of(name: str) -> list[str]:
    """The flags of a command of the page."""
    return documented(PAGE, name).replace("\\\n", " ").split()[3:]


def shows_parts_of(shown: str, printed: str) -> bool:
    """Whether a block of the page is the output, with a … for each run of lines that it leaves out."""
    lines = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
    return re.fullmatch(r"(?:.*\n)*".join(map(re.escape, shown.split("…\n"))), lines) is not None


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["planning", *flags])
    main()


def test_the_fastest_that_fit_come_first(founding: Answer) -> None:
    fits = [plan.fits for plan in founding.plans]
    speeds = [plan.tokens_per_second for plan in founding.plans if plan.fits]

    assert fits == sorted(fits, reverse=True)
    assert speeds == sorted(speeds, reverse=True)
    assert all(plan.memory.total <= founding.cluster.usable_memory for plan in founding.plans if plan.fits)


def test_a_whole_copy_of_13_billion_parameters_fits_no_gpu_of_80_gib(founding: Answer) -> None:
    reasons = {plan.layout.strategy: plan.reason for plan in founding.plans}

    assert re.fullmatch(r"needs 2\d\d\.\d GiB of 74\.1, 97\.0 of them for the optimizer", reasons["ddp"])
    assert reasons["zero3"] == ""


def test_a_node_holds_one_copy_of_the_model_while_its_ranks_load_it(founding: Answer) -> None:
    host = host_memory(founding.shape, founding.cluster)

    file = 4 * founding.shape.num_parameters
    assert file < host["loading"] < 1.3 * file  # not one for each of the 8 ranks
    assert host["saving"] == pytest.approx(file + 3 * file / 4)


def test_no_layout_is_faster_than_ideal_gpus(founding: Answer) -> None:
    assert all(0 < plan.share_of_ideal < 1 for plan in founding.plans)
    single = ask(("--model", "bert-base", "--gpus", "1", "--gpu", "a100-80gb")).best[0]
    assert single.share_of_ideal == pytest.approx(1)


@pytest.mark.parametrize(("model", "gpu"), [("distilbert-base", "t4-16gb"), ("bert-large", "a100-80gb")])
def test_the_efficiency_column_is_the_ratio_of_the_column_beside_it(model: str, gpu: str, printed: Printed) -> None:
    text = printed(ask(("--model", model, "--gpus", "8", "--gpu", gpu)))

    header, *rows = text.partition("\nFrom 1 to ")[2].partition("\nEfficiency: ")[0].splitlines()[1:]
    assert header.split()[-3:] == ["per", "GPU", "efficiency"]
    per_gpu = [float(row.split()[-2].replace(",", "")) for row in rows]
    assert [row.split()[-1] for row in rows] == [f"{speed / per_gpu[0]:.0%}" for speed in per_gpu]
    assert len(rows) == 4
    assert rows[0].split()[-1] == "100%"


def test_without_a_single_gpu_that_holds_the_model_there_is_no_efficiency(founding: Answer, printed: Printed) -> None:
    text = printed(founding)

    assert all(founding.efficiency(plan) is None for plan in founding.plans)
    assert "% of the ideal speed" in " ".join(text.split())
    assert "efficiency of" not in text


def test_parts_that_are_faster_than_a_whole_are_explained(founding: Answer, printed: Printed) -> None:
    few_tokens = ask(("--model", "llama-7b", "--gpus", "8", "--gpu", "a100-80gb", "--seq_len", "8"))

    assert few_tokens.best[0].share_of_ideal > 1.1
    assert "Faster than ideal" in printed(few_tokens)
    assert "Faster than ideal" not in printed(founding)


def test_the_target_is_what_the_other_run_computes(founding: Answer) -> None:
    # Six operations per parameter and token, plus attention: 21 days at 60% of 312 TFLOP/s.
    assert founding.target_tokens == pytest.approx(0.6 * 312e12 * 21 * 86_400 / (6 * 6.74e9), rel=0.1)
    assert founding.best[0].days(founding.target_tokens) < 21


def test_every_table_says_that_it_is_simulated(founding: Answer, printed: Printed) -> None:
    titles = [
        line.rstrip() for line in printed(founding).splitlines() if line[:1].isupper() and line.rstrip()[-1] == ")"
    ]

    assert len(titles) >= 7
    assert all(line.endswith("(simulated)") for line in titles)


def test_the_first_screen_has_the_verdict_five_layouts_and_one_command(
    founding: Answer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "WIDTH_OUTSIDE_TERMINALS", 80)
    print_answer(founding, details=False)

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 30
    assert "31 of 35 layouts fit" in lines[2]
    assert sum(bool(re.search(r"[\d,]+ +\d+%$", line.rstrip())) for line in lines) == 5
    assert sum("training/train_ddp.py" in line for line in lines) == 1
    assert lines[-1].startswith("--details: ")


def test_the_documented_answer_is_what_its_command_prints(founding: Answer, printed: Printed) -> None:
    shown = shown_after(PAGE, documented(PAGE, "founding"))

    assert shows_parts_of(shown, printed(founding))


def test_json_holds_the_plans_that_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, *SMALL, "--details", "--json", str(tmp_path / "plan.json"))

    record = json.loads((tmp_path / "plan.json").read_text())
    text = capsys.readouterr().out
    launches = [plan["launch"] for plan in record["plans"] if plan["fits"]][:3]
    assert record["simulated"] is True
    assert launches
    assert all(launch in text for launch in launches)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--gpu", "a100"), "--gpu a100: not known; did you mean a100-"),
        (("--gpu", "tpu"), "--gpu tpu: not known; known: t4-16gb"),
        (("--gpus", "30", "--nodes", "4"), "--gpus 30 on --nodes 4: not divisible; use 28 GPUs"),
        (("--gpus", "0"), "argument --gpus: 0: must be a whole number, at least 1 (see --help)"),
        (("--seq_len", "9000"), "--seq_len 9000: llama-13b has 4096 positions"),
        (("--batch_tokens", "5000"), "--batch_tokens 5000 and --seq_len 2048: does not make whole rows; use 4096"),
        (("--batch_tokens", "4096", "--strategy", "ddp"), "2 rows of 2048 tokens cannot be divided evenly over 32"),
        (
            ("--micro_batch", "3"),
            "--micro_batch 3: does not fill a global batch of 128 rows of 2048 tokens; use one of",
        ),
        (("--strategy", "tp", "--gpus", "1", "--nodes", "1"), "--strategy tp: has no layout of llama-13b on 1 x 1"),
        (("--strategy", "3d", "--gpus", "2", "--nodes", "1"), "--strategy 3d: has no layout of llama-13b on 1 x 2"),
        (("--gpus", "20000"), "--gpus 20000: at most 8192 can be planned"),
        (("--batch_tokens", "2048000000000000"), "--batch_tokens 2048000000000000: at most 268435456"),
        (("--seq_len", "7"), "--seq_len 7: the trainer takes rows of 8 tokens or more"),
        (("--gpu", "v100-32gb", "--precision", "bf16"), "--precision bf16: v100-32gb supports fp32, fp16"),
        (("--target_tokens", "many"), "many: must be a number of tokens, such as 2e9"),
        (("--target_run", "llama-7b"), "llama-7b: must be MODEL:DAYS:UTILISATION"),
        (("--target_run", "llama-7b:21:60"), "the utilisation above 0 and at most 1"),
        (("--target_run", "llama-7b:inf:0.6"), "the days must be above 0 and at most 36500"),
        (("--target_run", "llama-7b:21:nan"), "the utilisation above 0 and at most 1"),
        (("--target_run", "llama-6b:21:0.6"), "--model llama-6b: neither a known model"),
    ],
)
def test_bad_input_is_refused_in_one_line(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as raised:
        ask((*QUESTION, *flags))

    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_if_nothing_fits_the_error_says_what_the_closest_layout_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--model", "gpt3-175b", "--gpus", "8", "--gpu", "t4-16gb")
    found = ask(flags)

    assert not found.best
    with pytest.raises(UserError, match="simulated") as raised:
        run(monkeypatch, *flags)
    assert str(raised.value) == str(no_layout_fits(found))
    lack = float(re.search(r"lacks ([\d.]+) GiB per GPU", str(raised.value))[1])
    least = min(plan.memory.total for plan in found.plans) - found.cluster.usable_memory
    assert lack == pytest.approx(least / 2**30, abs=0.05)


@pytest.mark.parametrize("place", ["missing/plan.json", ""])
def test_a_file_that_cannot_be_written_is_named(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError) as raised:
        run(monkeypatch, *SMALL, "--json", str(tmp_path / place))

    assert str(raised.value).startswith(f"--json {tmp_path / place}: ")
    assert capsys.readouterr().out == ""


def test_a_model_of_known_dimensions_only_is_planned_without_a_command(printed: Printed) -> None:
    found = ask(("--model", "gpt3-175b", "--gpus", "64", "--gpu", "h100-80gb"))

    text = printed(found)
    assert "only the dimensions of gpt3-175b are known" in text
    assert "training/train" not in text
    assert all(plan["launch"] is None for plan in as_record(found)["plans"])


def test_planning_needs_no_torch() -> None:
    program = f"""
import sys
from training.planning.__main__ import ask
from training.planning.tables import as_record, print_answer
print_answer(ask({SMALL!r}), details=True)
as_record(ask({SMALL!r}))
sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert "simulated" in done.stdout


@pytest.fixture(scope="module")
def largest() -> list[LargestAnswer]:
    """The answers to the page's question for the largest models."""
    return ask_for_largest(flags_of("largest"))


@pytest.mark.slow
def test_the_largest_model_fits_and_one_of_a_layer_more_does_not(largest: list[LargestAnswer]) -> None:
    for family in largest:
        for one in family.found:
            shape = one.plan.shape
            assert one.plan.fits
            deeper = replace(shape, layers=shape.layers + 1)
            assert not any(plan.fits for plan in best_plans(deeper, family.cluster, family.work, (one.strategy,)))
            next_width = scaled(family.shape, shape.heads // 8 + 1)
            assert not any(plan.fits for plan in best_plans(next_width, family.cluster, family.work, (one.strategy,)))


def test_sharding_more_makes_room_for_larger_models(largest: list[LargestAnswer]) -> None:
    for family in largest:
        sizes = {one.strategy: one.plan.shape.num_parameters for one in family.found}
        assert sizes["ddp"] < sizes["zero1"] < sizes["zero2"] < sizes["zero3"] < sizes["3d"]
        # ddp holds 16 bytes per parameter and the 16-bit copies: less than 79.1 GiB / 16, more than half of it.
        assert 0.5 < sizes["ddp"] * 16 / family.cluster.gpu.memory_bytes < 1


def test_the_documented_largest_models_are_what_the_command_prints(
    largest: list[LargestAnswer], capsys: pytest.CaptureFixture[str]
) -> None:
    print_largest(largest)

    assert shows_parts_of(shown_after(PAGE, documented(PAGE, "largest")), capsys.readouterr().out)


def test_the_family_of_a_model_contains_models_of_its_proportions() -> None:
    llama, encoder = NAMED_SHAPES["llama-7b"], NAMED_SHAPES["distilbert-base"]

    assert replace(scaled(llama, 4), name=llama.name, source=llama.source) == llama
    assert (scaled(encoder, 3).hidden, scaled(encoder, 3).layers) == (1536, 12)
    assert scaled(NAMED_SHAPES["llama3-70b"], 8).kv_heads == 8
    assert scaled(llama, 1, extra_layers=2).layers == 10


def test_the_largest_models_are_written_as_json_and_strategies_without_a_layout_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_gpu = ("--largest", "--model", "distilbert-base", "--gpus", "1", "--gpu", "t4-16gb")
    run(monkeypatch, *one_gpu, "--json", str(tmp_path / "largest.json"))

    [family] = json.loads((tmp_path / "largest.json").read_text())
    assert family["simulated"] is True
    assert family["largest"]["zero3"] is None
    assert family["largest"]["ddp"]["memory"]["total"] <= family["largest"]["ddp"]["memory"]["available"]
    assert "Nothing fits under zero1 (no layout), " in capsys.readouterr().out


def test_without_a_model_there_is_nothing_to_plan_but_the_largest() -> None:
    with pytest.raises(UserError, match="--model: is missing; give one, or --largest"):
        ask(("--gpus", "2", "--gpu", "t4-16gb"))
    with pytest.raises(UserError, match="--largest and --target_tokens"):
        ask_for_largest(("--largest", "--gpus", "2", "--gpu", "t4-16gb", "--target_tokens", "1e9"))


@pytest.fixture(scope="module")
def gpt3() -> Answer:
    return ask(flags_of("gpt3"))


def test_gpt3_is_planned_with_tensor_parallelism_in_a_node_and_pipelines_between_nodes(gpt3: Answer) -> None:
    split = [plan for plan in gpt3.plans if plan.fits and plan.layout.tp == 8 and plan.layout.pp > 1]

    assert {8, 16} <= {plan.layout.pp for plan in split}
    assert all(plan.launch is None for plan in gpt3.plans)  # it is another program's to run


def test_the_documented_plan_of_gpt3_is_the_beginning_of_what_its_command_prints(
    gpt3: Answer, printed: Printed
) -> None:
    text = printed(gpt3)

    assert shows_parts_of(shown_after(PAGE, documented(PAGE, "gpt3")), text)
    assert "does not split the network of gpt3-175b" in text
