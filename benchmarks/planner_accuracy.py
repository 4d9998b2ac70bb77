"""How near the planner comes: to real steps on this machine's processes, and to runs that others published.

python -m benchmarks.planner_accuracy          # the published runs; real steps as last measured
python -m benchmarks.planner_accuracy --real   # measures those too: minutes, on a machine that does nothing else
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

from benchmarks.processes import ROOT
from benchmarks.published_training import GIB, published_section, states_section
from benchmarks.tables import HERE, Parser, circumstances, fact_list, markdown_table, read_results, write_table
from common.errors import UserError, run_command
from common.files import write_json
from common.hardware import usable_cpus
from training.planning.calibration import Calibration
from training.planning.dry_run import dry_run
from training.planning.hardware import GPUS, Cluster
from training.planning.models import NAMED_SHAPES
from training.planning.plan import make_plan
from training.planning.shapes import Layout, ModelShape

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
    """All that takes this machine; each measurement in processes of its own, one thread a process."""
    rows = []
    for model, shape in SHAPES.items():
        for layout in LAYOUTS:
            print(f"{model}: {describe(layout)}", file=sys.stderr)
            found = _real("memory", shape, layout)
            # Processes that share cores wait for each other in ways that no layout decides.
            if layout.ranks <= usable_cpus():
                found["step"] = _real("seconds", shape, layout)
            counted = dry_run(shape, layout, layout.ranks, "cpu").memory
            rows.append({"model": model, "layout": asdict(layout), "real": found, "dry_run": counted.total})
    return {"facts": circumstances("benchmarks.planner_accuracy"), "rows": rows}


def _real(what: str, shape: ModelShape, layout: Layout) -> dict[str, Any]:
    # One process alone has no group, and DDP no buckets.
    ranks = layout.ranks
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "benchmarks.real_step", what]
    command.append(json.dumps({"shape": asdict(shape), "layout": asdict(layout)}))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, cwd=ROOT)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"a real step of {ranks} processes took more than {LONGEST} seconds", code="benchmark-failed"
        ) from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise UserError(
            f"a real step of {ranks} processes failed: {done.stderr.strip()[-500:]}", code="benchmark-failed"
        )
    return json.loads(lines[-1])


def this_machine(rates: dict[str, float], ranks: int) -> Cluster:
    """The machine as the planner sees a cluster: one processor's share a rank, its links those of gloo."""
    gpu = replace(
        GPUS["cpu"],
        peak_flops={"fp32": rates["flops"]},
        memory_bandwidth=rates["memory"],
        link_bandwidth=rates.get("link", 1e9),
        matrix_share=1.0,
        attention_share=rates["attention_flops"] / rates["flops"],
    )
    reached = Calibration(half_dimension=0, memory_share=1.0, link_share=1.0)
    return Cluster(gpu, 1, ranks, link_latency=rates.get("latency", 0.0), calibration=reached)


def describe(layout: Layout) -> str:
    """A layout in few words."""
    degrees = {"tp": layout.tp, "pp": layout.pp, "shards": layout.dp_shard, "copies": layout.dp_replicate}
    words = [layout.strategy, *(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)]
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
    "dry run",
    "error",
    "formula",
    "error",
)
TIME_HEADER = ("model", "processes and layout", "GFLOP/s", "GiB/s", "step, ms", "simulated", "error")


def real_section(results: dict[str, Any]) -> str:
    """The tables of the real steps."""
    memory, times = [], []
    for row in results["rows"]:
        shape, layout, real = SHAPES[row["model"]], Layout(**row["layout"]), row["real"]
        step = real.get("step")
        plan = make_plan(
            shape, layout, this_machine(step, layout.ranks) if step else Cluster(GPUS["cpu"], 1, layout.ranks)
        )
        name = [row["model"], f"{layout.ranks}: {describe(layout)}"]
        states = [real["parameters"], plan.memory.parameters, real["optimizer"], plan.memory.optimizer]
        peak = [real["peak"], row["dry_run"]]
        memory.append(
            [
                *name,
                *(f"{bytes_ / 2**20:,.1f}" for bytes_ in states + peak),
                f"{row['dry_run'] / real['peak'] - 1:+.1%}",
                f"{plan.memory.total / 2**20:,.1f}",
                f"{plan.memory.total / real['peak'] - 1:+.1%}",
            ]
        )
        if step:
            seconds = [step["seconds"], plan.time.total]
            rates = [f"{step['flops'] / 1e9:.0f}", f"{step['memory'] / GIB:.1f}"]
            times.append([*name, *rates, *(f"{1000 * s:,.0f}" for s in seconds), f"{seconds[1] / seconds[0] - 1:+.0%}"])
    return (
        f"{fact_list(results['facts'])}\n"
        "Peak: of the third step, on the worst rank: what is alive in tensors when the optimizer begins, and from\n"
        "there back and forth what PyTorch's allocator gave out and took back, by the profiler's memory events. The\n"
        "dry run knows nothing of these processes but the layout.\n\n"
        f"{markdown_table(MEMORY_HEADER, memory)}\n"
        "Steps: the median of seven, of as many processes as there are cores at most, one thread each. The simulated\n"
        "ones use what a process reached in products and copies right before and after those steps.\n\n"
        f"{markdown_table(TIME_HEADER, times)}"
    )


def page(results: dict[str, Any]) -> str:
    """The whole page."""
    real = real_section(results) if results else "Not measured yet: `python -m benchmarks.planner_accuracy --real`.\n"
    return (
        "# How near the planner comes\n\nWritten by `python -m benchmarks.planner_accuracy`. Every figure under "
        '"simulated", "dry run" or "formula" is predicted, none was measured.\n\n'
        f"## Against real steps of gloo processes\n\n{real}\n## Against published runs\n\n"
        "The figures of others stand in `benchmarks/published_training.yaml`, each with its source. They ran other "
        "programs than ours:\nMegatron-LM overlaps tensor-parallel sums with products on H100s, which we do not "
        "model; llm-foundry's ALiBi models and\nTorchTitan's compiled ones differ in their element-wise kernels. "
        "No constant\nis fitted to a row; whether they were set with a source in sight stands with it.\n\n"
        f"{published_section()}\n{states_section()}"
    )


def main() -> None:
    """Write the page."""
    parser = Parser("benchmarks.planner_accuracy", __doc__ or "")
    parser.add_argument("--real", action="store_true", help="measure real steps anew")
    if parser.parse_args().real:
        write_json(RESULTS, measure())
    write_table(HERE / "planner_accuracy.md", page(read_results(RESULTS)))
    print(HERE / "planner_accuracy.md")


if __name__ == "__main__":
    run_command(main)
