"""The planner's error against real steps on this machine's processes, and against runs that others
published.

python -m benchmarks.planner_accuracy          # the published runs; real steps as last measured
python -m benchmarks.planner_accuracy --real   # measures those too: minutes, on a machine that does nothing else
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

from benchmarks.harness import (
    HERE,
    Parser,
    fact_list,
    markdown_table,
    measurement_facts,
    read_results,
    write_page,
)
from benchmarks.processes import ROOT
from benchmarks.published_training import published_section, states_section
from common.errors import UserError, run_command
from common.hardware import usable_cpus
from training.planning.hardware import GIB, GPUS, Calibration, Cluster
from training.planning.layouts import Layout
from training.planning.models import NAMED_SHAPES, ModelShape
from training.planning.plan import Plan, make_plan

RESULTS = HERE / "planner_accuracy.json"
LONGEST = 900  # seconds of one measurement
SIZE = {"seq_len": 128, "precision": "fp32"}
SHAPES = {
    "distilbert-base": NAMED_SHAPES["distilbert-base"],
    "llama, 8 blocks of 512": replace(
        NAMED_SHAPES["llama-7b"],
        layers=8,
        hidden=512,
        heads=8,
        kv_heads=4,
        head_dim=64,
        intermediate=1408,
        vocab=16_000,
        num_labels=4,
    ),
}
LAYOUTS = (
    Layout("ddp", micro_batch=8, **SIZE),
    Layout("ddp", dp_replicate=2, micro_batch=8, **SIZE),
    Layout("zero1", dp_replicate=2, micro_batch=8, **SIZE),
    Layout("zero2", dp_shard=2, micro_batch=8, **SIZE),
    Layout("zero3", dp_shard=2, micro_batch=8, **SIZE),
    Layout("zero3", dp_shard=2, micro_batch=8, activation_checkpointing="full", **SIZE),
    Layout("tp", tp=2, micro_batch=8, **SIZE),
    Layout("pp", pp=2, micro_batch=2, accumulation=4, **SIZE),
    Layout("zero3", dp_shard=4, micro_batch=4, **SIZE),
    Layout("3d", tp=2, dp_shard=2, micro_batch=4, **SIZE),
)


def measure() -> dict[str, Any]:
    """Real steps of every model and layout; each measurement in processes of its own, with one thread each."""
    rows = []
    for model, shape in SHAPES.items():
        for layout in LAYOUTS:
            print(f"{model}: {describe(layout)}", file=sys.stderr)
            # In a process of its own: the profiler that counts memory would slow the timed steps.
            found = _real("memory", shape, layout)
            # Processes that share a core wait for each other, which no layout predicts.
            if layout.ranks <= usable_cpus():
                found["step"] = _real("seconds", shape, layout)
            rows.append({"model": model, "layout": asdict(layout), "real": found})
    return {"facts": measurement_facts("benchmarks.planner_accuracy"), "rows": rows}


def _real(what: str, shape: ModelShape, layout: Layout) -> dict[str, Any]:
    # A single process has no process group, and DDP no buckets.
    ranks = layout.ranks
    launcher = (
        ["training/launch.py", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    )
    command = [sys.executable, *launcher, "-m", "benchmarks.real_step", what]
    command.append(json.dumps({"shape": asdict(shape), "layout": asdict(layout)}))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, cwd=ROOT)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"a real step of {ranks} processes took more than {LONGEST} seconds",
            code="benchmark-failed",
        ) from None
    # Libraries may print lines of their own; the result is the one that is JSON.
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise UserError(
            f"a real step of {ranks} processes failed: {done.stderr.strip()[-500:]}",
            code="benchmark-failed",
        )
    return json.loads(lines[-1])


def this_machine(rates: dict[str, float], ranks: int) -> Cluster:
    """The machine as a cluster: each rank's share of the CPU is a GPU, and gloo's links connect them."""
    # The rates were reached, not read from a data sheet, so the shares by which the planner takes
    # nominal figures down are 1 here.
    gpu = replace(
        GPUS["cpu"],
        peak_flops={"fp32": rates["flops"]},
        memory_bandwidth=rates["memory"],
        link_bandwidth=rates.get("link", 1e9),
        matrix_share=1.0,
        # Products of attention are small and slower than those of the feed-forward: the planner
        # takes the rate of the one as a share of that of the other.
        attention_share=rates["attention_flops"] / rates["flops"],
    )
    reached = Calibration(half_dimension=0, memory_share=1.0, link_share=1.0)
    return Cluster(gpu, 1, ranks, link_latency=rates.get("latency", 0.0), calibration=reached)


def plan_of(row: dict[str, Any]) -> Plan:
    """The plan for a measured row, at the rates that its machine reached; nominal ones if no step was timed."""
    layout, step = Layout(**row["layout"]), row["real"].get("step")
    # Memory does not depend on rates, so a row without a timed step still has its prediction of
    # bytes.
    cluster = this_machine(step, layout.ranks) if step else Cluster(GPUS["cpu"], 1, layout.ranks)
    return make_plan(SHAPES[row["model"]], layout, cluster)


def describe(layout: Layout) -> str:
    degrees = {
        "tp": layout.tp,
        "pp": layout.pp,
        "shards": layout.dp_shard,
        "replicas": layout.dp_replicate,
    }
    words = [
        layout.strategy,
        *(f"{name} {degree}" for name, degree in degrees.items() if degree > 1),
    ]
    words += [f"{layout.accumulation} x {layout.micro_batch} rows"]
    return ", ".join(words + ["full checkpointing"] * (layout.activation_checkpointing == "full"))


MEMORY_HEADER = (
    "model",
    "processes and layout",
    "weights, MiB",
    "simulated",
    "moments, MiB",
    "simulated",
    "peak, MiB",
    "simulated",
    "error",
)
TIME_HEADER = (
    "model",
    "processes and layout",
    "GFLOP/s",
    "GiB/s",
    "step, ms",
    "simulated",
    "error",
)


def real_section(results: dict[str, Any]) -> str:
    memory, times = [], []
    for row in results["rows"]:
        plan, real = plan_of(row), row["real"]
        step = real.get("step")
        name = [row["model"], f"{plan.layout.ranks}: {describe(plan.layout)}"]
        states = [
            real["parameters"],
            plan.memory.parameters,
            real["optimizer"],
            plan.memory.optimizer,
        ]
        peak = [real["peak"], plan.memory.total]
        error = f"{plan.memory.total / real['peak'] - 1:+.1%}"
        memory.append([*name, *(f"{size / 2**20:,.1f}" for size in states + peak), error])
        if step:
            seconds = [step["seconds"], plan.time.total]
            rates = [f"{step['flops'] / 1e9:.0f}", f"{step['memory'] / GIB:.1f}"]
            times.append(
                [
                    *name,
                    *rates,
                    *(f"{1000 * s:,.0f}" for s in seconds),
                    f"{seconds[1] / seconds[0] - 1:+.0%}",
                ]
            )
    return (
        f"{fact_list(results['facts'])}\n"
        "The peak is that of the third step, on the rank that needs most. It is the memory of all "
        "tensors that are\n"
        "alive when the optimizer begins, corrected by what PyTorch's allocator allocated and "
        "freed before and after\n"
        "that moment, according to the profiler's memory events. On CPUs, `ddp` and `zero1` keep "
        "the word embeddings\n"
        "out of DDP's buckets; the planner counts them, because on GPUs they are in them.\n\n"
        f"{markdown_table(MEMORY_HEADER, memory)}\n"
        "A step's time is the median of seven steps, with at most as many processes as cores and "
        "one thread each.\n"
        "The simulated steps use the rates that a process reached in matrix products and copies "
        "right before and\n"
        "after them.\n\n"
        f"{markdown_table(TIME_HEADER, times)}"
    )


def page(results: dict[str, Any]) -> str:
    real = (
        real_section(results)
        if results
        else "Not measured yet: `python -m benchmarks.planner_accuracy --real`.\n"
    )
    return (
        "# How accurate the planner is\n\nWritten by `python -m benchmarks.planner_accuracy`. "
        "Every figure under "
        '"simulated" is a prediction, not a measurement.\n\n'
        f"## Against real steps of gloo processes\n\n{real}\n## Against published runs\n\n"
        "The measured figures are in `benchmarks/published_training.yaml`, each with its source. "
        "They come from "
        "programs other\nthan ours: Megatron-LM overlaps tensor-parallel sums with matrix products "
        "on H100s, which is "
        "not modelled; llm-foundry's\nALiBi models and TorchTitan's compiled ones differ in their "
        "element-wise kernels."
        " No constant is fitted to a row; for each\nsource the page says whether we had seen it "
        "when the constants were"
        " set.\n\n"
        f"{published_section()}\n{states_section()}"
    )


def main() -> None:
    parser = Parser("benchmarks.planner_accuracy", __doc__ or "")
    parser.add_argument("--real", action="store_true", help="measure the real steps again")
    results = measure() if parser.parse_args().real else read_results(RESULTS)
    write_page(HERE / "planner_accuracy.md", page(results), results or None)
    print(HERE / "planner_accuracy.md")


if __name__ == "__main__":
    run_command(main)
