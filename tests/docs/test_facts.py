"""Statements of the learning pages that arithmetic, PyTorch or a measured page decides."""

from __future__ import annotations

import re
import runpy
from math import sqrt

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from learn.by_hand.collectives import all_to_all, gather, scatter
from learn.by_hand.ring_all_reduce import ALL_GATHER, REDUCE_SCATTER, ring_steps
from tests.docs.pages import REPOSITORY
from tests.processes import run_on_ranks
from tests.training.faults.cases import FAMILIES
from training.conflicts import CONFLICTS
from training.facts import FLAGS_OF_STRATEGIES, FLAGS_OF_TASKS
from training.planning.communication import transfers
from training.planning.hardware import GPUS, Cluster
from training.planning.layouts import Layout, pipeline_ranks
from training.planning.memory import block_activations
from training.planning.models import NAMED_SHAPES

GUIDE, QUESTIONS = "docs/DISTRIBUTED_TRAINING_GUIDE.md", "docs/INTERVIEW_QUESTIONS.md"
STRATEGIES, CARDS = "docs/PARALLELISM_STRATEGIES.md", "docs/QUICK_REFERENCE.md"


def page(name: str) -> str:
    """The text of a page, each paragraph on one line."""
    return re.sub(r"(?<!\n)\n(?![\n|#\-`])", " ", (REPOSITORY / name).read_text())


def cells(name: str, first: str) -> list[str]:
    """The row of a page's table whose first cell begins with ``first``, without that cell."""
    row = re.search(rf"^\| {re.escape(first)}[^|]*\|(.*)\|$", (REPOSITORY / name).read_text(), re.MULTILINE)
    assert row, first
    return [cell.strip() for cell in row[1].split("|")]


# The order of composition.


def _split_what_is_sharded() -> str:
    """What PyTorch says to it; on ranks of their own, because DTensor remembers every mesh of its process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = torch.nn.Linear(8, 8)
    fully_shard(layer, mesh=mesh["dp"])
    with pytest.raises(ValueError, match="Cannot distribute a DTensor with device mesh") as refused:
        parallelize_module(layer, mesh["tp"], ColwiseParallel())
    return str(refused.value)


def test_pytorch_refuses_to_split_what_is_already_sharded_and_the_pages_say_so() -> None:
    refused = run_on_ranks(4, _split_what_is_sharded)[0]

    quoted = re.escape("ValueError: " + refused.partition(" with device mesh")[0])
    for name in (GUIDE, STRATEGIES):
        assert re.search(quoted, page(name))
        assert "right-looking" not in page(name)
        assert "losses that look right, and wrong gradients" not in page(name)


def test_the_table_of_flags_that_go_together_is_what_the_configuration_takes() -> None:
    flags = runpy.run_path(str(REPOSITORY / "docs" / "site" / "flags.py"))

    # What depends on the machine, the data or the names of files is no matter of flags that go together.
    others = {"dataset", "device", "epochs", "layers", "lora_alpha", "metrics_host", "model", "precision", "tf32"}
    others |= {"strategy", "task", "train_split", "validation_split", "test_split"}  # columns of the table, and splits
    conflicting = {name for conflict in CONFLICTS for name in re.findall(r"{(\w+)}", conflict.message)}
    assert {*FLAGS_OF_STRATEGIES, *FLAGS_OF_TASKS, *conflicting} - others <= flags["EXAMPLES"].keys()
    assert (REPOSITORY / STRATEGIES).read_text() == flags["page_with_table"](), "run python docs/site/flags.py"


def test_the_page_of_strategies_counts_the_layouts_that_were_checked() -> None:
    (checked,) = re.findall(r"^(\d+) layouts, each", (REPOSITORY / "benchmarks/equivalence.md").read_text(), re.M)

    assert f"Each of {checked} layouts" in page(STRATEGIES)


# What collectives send.


def _sent_by_hand() -> dict[str, int]:
    """Bytes that this rank sends of a tensor with 4 bytes per rank: around a ring, or straight to the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(size, dtype=torch.int32)
    steps = list(ring_steps(tensor.clone()))
    sent = {
        phase: sum(step.num_bytes for step in steps if step.phase == phase) for phase in (REDUCE_SCATTER, ALL_GATHER)
    }
    sent["all_reduce"] = sum(step.num_bytes for step in steps)
    held, own = {}, tensor.nbytes // size
    for collective in (gather, scatter, all_to_all):
        before, _ = collective(tensor.clone())
        held[collective.__name__] = before.nbytes
    # A rank sends all that it holds but what stays with itself.
    sent["gather"] = held["gather"] if rank else 0
    sent["scatter"] = held["scatter"] - own if rank == 0 else 0
    sent["all_to_all"] = held["all_to_all"] - own
    return sent


def test_the_bytes_of_each_collective_are_what_the_ones_by_hand_send() -> None:
    found = run_on_ranks(4, _sent_by_hand)
    most = {name.replace("-", "_"): max(rank[name] for rank in found) for name in found[0]}

    assert "V is the size of the *full* tensor in bytes" in page(CARDS)
    for name, sent in most.items():
        assert _value(cells(CARDS, f"`{name}`")[1], ranks=4, variable="V", size=16) == sent, name


def _value(formula: str, *, ranks: int, variable: str, size: float) -> float:
    """Such as ``2 V (N-1)/N``, in numbers."""
    factors = formula.partition(",")[0].replace(variable, str(size)).replace("N", str(ranks)).strip()
    return eval(re.sub(r"(?<=[\d)]) +(?=[\d(])", " * ", factors))


def _planned_bytes(strategy: str, precision: str) -> float:
    """Bytes that a rank of eight sends in a step, for each parameter, by the planner."""
    shape = NAMED_SHAPES["llama-13b"]
    sharded = {"dp_shard": 8} if strategy in ("zero2", "zero3") else {"dp_replicate": 8}
    layout = Layout(strategy, precision=precision, **sharded)
    cluster = Cluster(GPUS["a100-80gb"], 1, 8)
    found = transfers(shape, layout, pipeline_ranks(shape, layout)[0], cluster)
    return sum(transfer.bytes for transfer in found) / shape.num_parameters


@pytest.mark.parametrize(
    ("row", "strategy"), [("DDP", "ddp"), ("ZeRO-1", "zero1"), ("ZeRO-2, zero2 here", "zero2"), ("ZeRO-3", "zero3")]
)
def test_the_traffic_of_a_step_is_what_the_planner_counts(row: str, strategy: str) -> None:
    formulas = re.findall(
        r"^\| " + re.escape(row.removesuffix(" |")) + r" \| (\d+ P \(N-1\)/N[^|]*)", page(CARDS), re.M
    )
    whole, _, half = formulas[0].partition("(N-1)/N")
    in_half = re.search(r"\((\d+) P in bf16\)", half)

    fp32 = _value(whole + "(N-1)/N", ranks=8, variable="P", size=1)
    bf16 = int(in_half[1]) * 7 / 8 if in_half else fp32

    # What lies outside the blocks is gathered only once under zero3.
    assert _planned_bytes(strategy, "fp32") == pytest.approx(fp32, rel=0.02)
    assert _planned_bytes(strategy, "bf16") == pytest.approx(bf16, rel=0.02)


@pytest.mark.parametrize("name", [STRATEGIES, CARDS, "docs/TROUBLESHOOTING.md"])
def test_no_page_advises_zero1_before_zero2(name: str) -> None:
    text = page(name)

    assert not re.search(r"`(--strategy )?zero1`, (then )?`zero2`, then `zero3`", text)
    assert not re.search(r"moments do not fit[^|]*\| `zero1`", text)
    assert "least traffic" not in text


# Memory.


def test_the_constant_of_activations_is_what_the_planner_counts() -> None:
    shape = NAMED_SHAPES["bert-base"]
    seq_len = 128

    def bytes_of_a_block(precision: str, *, gathered: bool) -> tuple[float, float]:
        found = block_activations(shape, seq_len, precision=precision, gathered=gathered, fused_attention=False)
        linear = found.norms + found.inputs + found.split
        return linear / shape.hidden, found.scores / (shape.heads * seq_len)

    text = page(CARDS)
    least, scores = bytes_of_a_block("bf16", gathered=True)
    most, _ = bytes_of_a_block("bf16", gathered=False)
    full, full_scores = bytes_of_a_block("fp32", gathered=False)
    assert f"{least:.0f} to {most:.0f} as it is counted here, {full:.0f} in fp32" in text
    assert f"{scores:.0f} bytes × rows × heads × tokens² in 16 bits, {full_scores:.0f} in fp32" in text


# Measured figures.


def test_what_a_save_costs_counts_the_steps_that_it_slows_down() -> None:
    def figures(layout: str) -> list[float]:
        row = cells("benchmarks/async_saving.md", layout)
        return [float(row[place].split()[0]) for place in (1, 2, 8)]

    waited, blocked, cost = figures("1 × 2")
    hours = 3 * 3600
    assert blocked < cost < waited
    assert f"**{cost:.2f}** s in all" in page(QUESTIONS)
    assert f"every {sqrt(2 * cost * hours):.0f} s instead of every {sqrt(2 * waited * hours):.0f}" in page(QUESTIONS)
    waited, blocked, cost = figures("2 × 1")
    assert f"**{cost:.2f}** s in total" in page(GUIDE)
    assert ("that is no gain" in page(GUIDE)) == (cost >= waited)


def test_two_accuracies_on_cifar10_are_within_what_its_test_images_can_tell_apart() -> None:
    table = (REPOSITORY / "benchmarks/by_hand.md").read_text()
    one, two = (float(accuracy) for accuracy in re.findall(r"^\| [12] \| (\d\d\.\d\d)% \|", table, re.MULTILINE))
    # Each is a share of 10,000 images: the standard error of their difference, in points.
    error = sqrt(sum(accuracy * (100 - accuracy) / 10_000 for accuracy in (one, two)))

    assert abs(one - two) < error
    assert "as far as 10,000 test images can tell" in page(GUIDE)


def test_the_lines_that_the_table_of_faults_quotes_are_in_the_words_of_the_program() -> None:
    faults = [fault for family in FAMILIES for fault in family if fault.says]

    for fault in faults:
        happened = cells("benchmarks/faults.md", fault.name)[1]
        assert re.search(f'"{fault.says}"$', happened), fault.name
    assert faults
