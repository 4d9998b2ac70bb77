"""Published training runs, compared with what the planner predicts for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.harness import HERE, markdown_table
from training.planning.hardware import GIB, GPUS, Calibration, Cluster
from training.planning.layouts import Layout
from training.planning.memory import GRADIENT, MOMENTS, WEIGHT, zero_states
from training.planning.models import NAMED_SHAPES, ModelShape, gpt
from training.planning.plan import Plan, make_plan

PUBLISHED = HERE / "published_training.yaml"


@dataclass(frozen=True)
class Comparison:
    """One published run and its plan."""

    row: dict[str, Any]
    plan: Plan
    measured: float  # tokens per second per GPU
    memory: float | None  # bytes, if they are published
    held_out: bool  # the planner's constants were set without a look at it
    # The source leaves out the micro-batch or the checkpointing; the plan has the fastest that
    # fits.
    is_chosen: bool

    @property
    def predicted(self) -> float:
        return self.plan.tokens_per_second / self.plan.layout.ranks

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def compare(path: Path = PUBLISHED) -> dict[str, tuple[dict[str, Any], list[Comparison]]]:
    """Each source of the file by its title: its description and its runs."""
    sources = yaml.safe_load(path.read_text(encoding="utf-8"))["sources"]
    return {
        source["title"]: (source, [_compare(source, row) for row in source["rows"]])
        for source in sources
    }


def _compare(source: dict[str, Any], row: dict[str, Any]) -> Comparison:
    shape = _shape(source, row)
    gpu = replace(GPUS[source["gpu"]], **source.get("gpu_is", {}))
    # A run on fewer GPUs than a machine has stays within one.
    per_node = min(gpu.gpus_per_node, row["gpus"])
    calibration = Calibration(**source.get("calibration", {}))
    cluster = Cluster(gpu, row["gpus"] // per_node, per_node, calibration=calibration)
    plans = [make_plan(shape, layout, cluster) for layout in _layouts(source, row)]
    # Every published run did fit, so if no plan does by the formulas, the smallest is compared.
    smallest = min(plans, key=lambda plan: plan.memory.total)
    # Where the source leaves a choice open, its authors will have taken the fastest that fits.
    plan = max(
        (plan for plan in plans if plan.fits),
        key=lambda plan: plan.tokens_per_second,
        default=smallest,
    )
    memory = row["memory_gib"] * GIB if "memory_gib" in row else None
    held_out = row.get("held_out", source["held_out"])
    is_chosen = row["micro_batch"] is None or row["activation_checkpointing"] is None
    return Comparison(row, plan, _measured_tokens(source, row, shape), memory, held_out, is_chosen)


def _shape(source: dict[str, Any], row: dict[str, Any]) -> ModelShape:
    if source["family"] == "llama":
        return NAMED_SHAPES[row["name"]]
    size = {"vocab": source["vocab"], "max_positions": source["seq_len"]}
    return gpt(row["name"], row["layers"], row["hidden"], row["heads"], **size)


def _layouts(source: dict[str, Any], row: dict[str, Any]) -> Iterator[Layout]:
    """The row's layout, with every choice that the source leaves open."""
    degrees = {name: row[name] for name in ("tp", "pp", "dp_replicate", "dp_shard") if name in row}
    if row["strategy"] in ("zero2", "zero3"):
        degrees["dp_shard"] = row["gpus"]
    checkpointing = row["activation_checkpointing"]
    modes = [checkpointing] if checkpointing else ["none", "selective"]
    for (micro_batch, accumulation), mode in product(_batches(row), modes):
        yield Layout(
            row["strategy"],
            micro_batch=micro_batch,
            accumulation=accumulation,
            seq_len=source["seq_len"],
            precision=source.get("precision", "bf16"),
            activation_checkpointing=mode,
            sequence_parallel=row.get("sequence_parallel", False),
            schedule=row.get("schedule", "1f1b"),
            **degrees,
        )


def _batches(row: dict[str, Any]) -> list[tuple[int, int]]:
    """The rows of a micro-batch and how many of them make a step, as each choice has them."""
    if "rows_per_step" not in row:
        return [(row["micro_batch"], row.get("accumulation", 1))] if row["micro_batch"] else []
    # Ranks of one tensor or pipeline group work on the same rows, so only the others divide a step.
    data_ranks = row["gpus"] // (row.get("tp", 1) * row.get("pp", 1))
    rows = row["rows_per_step"] // data_ranks
    fitting = [number for number in (1, 2, 4, 8, 16) if rows % number == 0]
    chosen = [row["micro_batch"]] if row["micro_batch"] else fitting
    return [(micro_batch, rows // micro_batch) for micro_batch in chosen]


def _measured_tokens(source: dict[str, Any], row: dict[str, Any], shape: ModelShape) -> float:
    if "tokens_per_gpu" in row:
        return row["tokens_per_gpu"]
    layers, hidden = shape.layers, shape.hidden
    # Some sources publish FLOP/s instead of tokens. They count operations by Megatron's formula,
    # which is undone here: per token 72 * layers * hidden^2, or 96 if a forward pass is repeated
    # for checkpointing, times a factor for attention and the head.
    attention = source["seq_len"] / (6 * hidden)
    recomputed = source["flops_formula"] == "megatron-recomputed"
    factor, head = (96, 16) if recomputed else (72, 12)
    flops = factor * layers * hidden**2 * (1 + attention + shape.vocab / (head * layers * hidden))
    return row["teraflops_per_gpu"] * 1e12 / flops


def published_section() -> str:
    found = compare()
    every = [run for _, runs in found.values() for run in runs]
    misfits = sum(not run.plan.fits for run in every)
    chosen = sum(run.is_chosen for run in every)
    text = (
        f"{markdown_table(_SUMMARY_HEADER, _summary(found))}\n"
        f"In reality all {len(every)} runs fit on their GPUs, but according to the formulas "
        f"{misfits} do not, as the "
        "last column shows. The\nformulas are those of this trainer; the memory that the other "
        "programs save is not "
        f"modelled.\nFor {chosen} runs the source leaves out the micro-batch or the checkpointing. "
        "For these the plan "
        "uses the choice that is\npredicted to be the fastest that fits, or the smallest if none "
        "fits, so their errors "
        "include the effect of that choice.\n"
    )
    text += _trend_section(every)
    for title, (source, runs) in found.items():
        text += f"\n### {title}\n\nSource: {source['from']}.\n"
        text += f"{source['constants']}\n"
        text += (
            f"Assumed because the source does not say: {source['assumed']}.\n"
            if "assumed" in source
            else ""
        )
        text += "\n" + markdown_table(_HEADER, [_table_row(run) for run in runs])
    return text


def trends(runs: Sequence[Comparison]) -> list[tuple[Comparison, Comparison]]:
    """Of runs that differ only in the number of GPUs, the one on the fewest and the one on the most."""
    groups: dict[tuple[Any, ...], list[Comparison]] = {}
    for run in runs:
        # With more GPUs each keeps a smaller shard, so the shards must not tell layouts apart.
        key = run.row["name"], run.plan.cluster.gpu.name, replace(run.plan.layout, dp_shard=1)
        groups.setdefault(key, []).append(run)
    ordered = [sorted(group, key=lambda run: run.plan.layout.ranks) for group in groups.values()]
    return [
        (group[0], group[-1])
        for group in ordered
        if group[0].plan.layout.ranks < group[-1].plan.layout.ranks
    ]


def _trend_section(runs: Sequence[Comparison]) -> str:
    rows = [
        [
            small.row["name"],
            f"{small.plan.layout.ranks} to {large.plan.layout.ranks}",
            f"{large.measured / small.measured - 1:+.1%}",
            f"{large.predicted / small.predicted - 1:+.1%}",
            f"{small.error:+.0%} to {large.error:+.0%}",
        ]
        for small, large in trends(runs)
    ]
    header = ("run", "GPUs", "tokens/s per GPU, measured", "simulated", "error")
    return (
        "\n### More GPUs, with everything else unchanged\n\n"
        "The table shows how the speed of each GPU changes between the smallest and the largest "
        "published run. The "
        "prediction\nfalls less than the measurement, so it becomes more optimistic with every "
        "machine that is added: "
        "the latency of a ring is\nmodelled, but neither GPUs that are slower than the others nor "
        "traffic that "
        f"competes for the same switches.\n\n{markdown_table(header, rows)}"
    )


_SUMMARY_HEADER = (
    "runs",
    "count",
    "within 25%",
    "median error",
    "largest error",
    "fit by the formulas",
)


def _summary(found: dict[str, tuple[dict[str, Any], list[Comparison]]]) -> list[list[str]]:
    every = [run for _, runs in found.values() for run in runs]
    groups = {
        "held out when the constants were set": [run for run in every if run.held_out],
        "seen when the constants were set": [run for run in every if not run.held_out],
        **{title: runs for title, (_, runs) in found.items()},
    }
    return [[name, *_accuracy(runs)] for name, runs in groups.items()]


def _accuracy(runs: Sequence[Comparison]) -> list[str]:
    errors = [abs(run.error) for run in runs]
    near, fitting = sum(error <= 0.25 for error in errors), sum(run.plan.fits for run in runs)
    return [str(len(runs)), str(near), f"{median(errors):.0%}", f"{max(errors):.0%}", str(fitting)]


_HEADER = (
    "run",
    "GPUs",
    "layout",
    "tokens/s per GPU",
    "simulated",
    "error",
    "GiB",
    "simulated",
    "error",
    "fits",
)


def _table_row(run: Comparison) -> list[str]:
    layout = run.plan.layout
    degrees = {
        "tp": layout.tp,
        "pp": layout.pp,
        "shards": layout.dp_shard,
        "replicas": layout.dp_replicate,
    }
    words = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    words += [
        f"{layout.accumulation} x {layout.micro_batch} rows",
        f"checkpointing {layout.activation_checkpointing}",
    ]
    words += [word for word in ("compiled", "pure_bf16") if run.row.get(word)]
    speed = [f"{run.measured:,.0f}", f"{run.predicted:,.0f}", f"{run.error:+.0%}"]
    fits = "yes" if run.plan.fits else "no"
    memory = ["–"] * 3
    if run.memory:
        simulated = run.plan.memory.total
        memory = [
            f"{run.memory / GIB:.1f}",
            f"{simulated / GIB:.1f}",
            f"{simulated / run.memory - 1:+.0%}",
        ]
    return [run.row["name"], str(run.row["gpus"]), ", ".join(words), *speed, *memory, fits]


def states_section() -> str:
    figure = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))["states"]
    paper, trainer = tuple(figure["bytes_per_parameter"]), (WEIGHT, GRADIENT, MOMENTS)
    rows = []
    for stage, published in enumerate(figure["gigabytes"]):
        same, ours = (
            sum(zero_states(figure["parameters"], figure["ranks"], stage, each)) / 1e9
            for each in (paper, trainer)
        )
        rows.append(
            [
                f"stage {stage}",
                f"{published:g}",
                f"{same:.1f}",
                f"{same / published - 1:+.0%}",
                f"{ours:.1f}",
            ]
        )
    header = (
        "ZeRO",
        "published, GB per rank",
        "simulated",
        "error",
        "simulated with this trainer's bytes",
    )
    return (
        f"### ZeRO's states\n\nSource: {figure['from']}.\nA parameter has {paper[0]}, {paper[1]} "
        f"and {paper[2]} bytes "
        f"of weights, gradients and optimizer state there, and {WEIGHT}, {GRADIENT} and {MOMENTS} "
        "here.\n\n"
        f"{markdown_table(header, rows)}"
    )
