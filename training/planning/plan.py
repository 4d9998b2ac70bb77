"""Which layouts fit a cluster and how fast they run, ranked; how that scales; and the command that
launches each.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from common.errors import UserError
from training.facts import DECODER_TASK, STRATEGY_FACTS
from training.planning.communication import Transfer
from training.planning.hardware import (
    COPY_BANDWIDTH,
    GIB,
    HASH_BANDWIDTH,
    STORAGE_BANDWIDTH,
    Cluster,
)
from training.planning.layouts import STRATEGIES, Layout, Work, divisors, layouts_of, with_batches
from training.planning.memory import MOMENTS, WEIGHT, MemoryEstimate, estimate_memory
from training.planning.models import ModelShape
from training.planning.step_time import StepTime, estimate_step

SHORTEST_TEXT, LONGEST_TEXT = 8, 8192  # tokens that the trainer accepts as --max_length
ROUNDING = 0.005  # differences that whole percents do not show


@dataclass(frozen=True)
class Plan:
    """A layout with its predicted memory and speed; every figure is simulated."""

    shape: ModelShape
    layout: Layout
    cluster: Cluster
    memory: MemoryEstimate
    transfers: tuple[Transfer, ...]  # those of the slowest stage
    time: StepTime
    reason: str  # why the layout does not fit; empty if it does

    @property
    def fits(self) -> bool:
        return not self.reason

    @property
    def tokens_per_second(self) -> float:
        return self.layout.tokens_per_step / self.time.total

    @property
    def mfu(self) -> float:
        """Share of the peak that the model's own operations take, without recomputation (PaLM,
        arXiv 2204.02311).
        """
        flops = 3 * self.shape.forward_flops(self.layout.seq_len) / self.layout.seq_len
        peak = self.cluster.gpu.peak_flops[self.layout.precision]
        return self.tokens_per_second / self.layout.ranks * flops / peak

    @property
    def share_of_ideal(self) -> float:
        """Tokens per second over those of the same number of ideal GPUs; the rest is the cost of
        the layout.

        An ideal GPU has memory for the whole model, takes all its rows at once, communicates and
        recomputes nothing, and updates only its share of the weights. A real single GPU updates all
        weights: see ``Answer.efficiency``.
        """
        layout = self.layout
        rows = max(1, round(layout.tokens_per_step / layout.seq_len / layout.ranks))
        single = Layout("ddp", micro_batch=rows, seq_len=layout.seq_len, precision=layout.precision)
        time, _ = estimate_step(self.shape, single, self.cluster)
        ideal = single.tokens_per_step / (time.compute + time.optimizer / layout.ranks)
        return self.tokens_per_second / layout.ranks / ideal

    @property
    def launch(self) -> str | None:
        """The command that trains with this layout, or None if the trainer cannot: see
        :func:`cautions`.
        """
        return launch_command(self.shape, self.layout, self.cluster)

    def days(self, tokens: float) -> float:
        return tokens / self.tokens_per_second / 86_400


def make_plan(shape: ModelShape, layout: Layout, cluster: Cluster) -> Plan:
    memory = plan_memory(shape, layout, cluster)
    time, found = estimate_step(shape, layout, cluster)
    reason = ""
    if memory.total > cluster.usable_memory:
        part, largest = largest_part(memory)
        needs = f"needs {memory.total / GIB:,.1f} GiB of {cluster.usable_memory / GIB:,.1f}"
        reason = f"{needs}, {largest / GIB:,.1f} of them for {part}"
    return Plan(shape, layout, cluster, memory, tuple(found), time, reason)


def largest_part(memory: MemoryEstimate) -> tuple[str, float]:
    """What takes most of the memory, and how many bytes."""
    parts = ("weights", "gradients", "the optimizer", "activations", "gathered weights and buffers")
    return max(zip(parts, asdict(memory).values(), strict=True), key=lambda pair: pair[1])


def plan_memory(shape: ModelShape, layout: Layout, cluster: Cluster) -> MemoryEstimate:
    # A CPU's attention keeps its scores if it drops some of them.
    fused_attention = cluster.gpu.name != "cpu" or not shape.traits.dropout_masks
    return estimate_memory(shape, layout, fused_attention=fused_attention)


def checkpoint_cost(shape: ModelShape, cluster: Cluster) -> dict[str, float]:
    """Bytes of a checkpoint of weights and moments, and the seconds of its parts.

    Each rank copies its part to the node's memory, then writes and hashes it while training
    continues, so training waits only for the copy. Writing and hashing need CPU time, which matters
    only if training runs on the CPU too.
    """
    size = (WEIGHT + MOMENTS) * shape.num_parameters
    per_rank = size / cluster.gpus
    seconds = {
        "copy": per_rank / COPY_BANDWIDTH,
        "write": size / cluster.nodes / STORAGE_BANDWIDTH,
        "hash": per_rank / HASH_BANDWIDTH,
    }
    return {"bytes": size, **seconds, "seconds": sum(seconds.values())}


@dataclass(frozen=True)
class Answer:
    """All plans for one model, cluster and global batch."""

    shape: ModelShape
    cluster: Cluster
    work: Work
    # The best of each strategy and product of degrees; those that fit first, the fastest first.
    plans: list[Plan]
    # The best for 1, 2, 4 ... GPUs with as many tokens per GPU; None if nothing fits.
    scaling: dict[int, Plan | None]
    target_tokens: float | None

    @property
    def best(self) -> list[Plan]:
        return [plan for plan in self.plans if plan.fits][:3]

    def efficiency(self, plan: Plan) -> float | None:
        """Tokens per second per GPU, over those of a single GPU; None if a single GPU cannot hold
        the model.
        """
        single = self.scaling.get(1)
        return single and plan.tokens_per_second / plan.layout.ranks / single.tokens_per_second

    @property
    def warnings(self) -> list[str]:
        """What a reader of the best plans should know."""
        found = [caution for plan in self.best for caution in cautions(plan.shape, plan.layout)]
        if any(plan.share_of_ideal > 1 + ROUNDING for plan in self.best):
            found.append(
                "Faster than ideal: with so few tokens, a GPU with the whole model spends its "
                "time on reading weights, "
                "and each of these GPUs reads only a part of them."
            )
        return list(dict.fromkeys(found))


def answer(
    shape: ModelShape,
    cluster: Cluster,
    work: Work,
    strategies: Sequence[str] = STRATEGIES,
    target_tokens: float | None = None,
) -> Answer:
    """Raises UserError if no strategy has a layout for so many GPUs, or can divide the global
    batch.
    """
    plans = best_plans(shape, cluster, work, strategies)
    if not plans:
        raise _no_layout(shape, cluster, work, strategies)
    scaling: dict[int, Plan | None] = {}
    for gpus in divisors(cluster.gpus):
        per_node = min(gpus, cluster.gpus_per_node)
        if gpus % per_node or cluster.gpus_per_node % per_node:
            continue  # it neither fills whole nodes nor divides one
        found = plans
        if gpus < cluster.gpus:
            smaller = replace(cluster, nodes=gpus // per_node, gpus_per_node=per_node)
            fewer_rows = replace(work, rows=work.rows * gpus // cluster.gpus)
            # A single GPU has no layout but ddp, whatever was asked for.
            asked = strategies if gpus > 1 else ("ddp",)
            found = best_plans(shape, smaller, fewer_rows, asked) if fewer_rows.rows else []
        scaling[gpus] = next((plan for plan in found if plan.fits), None)
    return Answer(shape, cluster, work, plans, scaling, target_tokens)


def best_plans(
    shape: ModelShape, cluster: Cluster, work: Work, strategies: Sequence[str]
) -> list[Plan]:
    """For each strategy and product of degrees the fastest plan that fits, or the smallest if none
    does.
    """
    found = []
    for strategy in strategies:
        for layout in layouts_of(shape, cluster, strategy):
            # Memory decides first, since time takes longer to estimate.
            needed = {
                batch: plan_memory(shape, batch, cluster).total
                for batch in with_batches(shape, layout, work)
            }
            fitting = [batch for batch, total in needed.items() if total <= cluster.usable_memory]
            if not fitting and needed:
                fitting = [min(needed, key=needed.__getitem__)]
            plans = [make_plan(shape, batch, cluster) for batch in fitting]
            fastest = max(plans, key=_speed_then_memory, default=None)
            found += [fastest] if fastest else []
    return sorted(found, key=_rank)


def _speed_then_memory(plan: Plan) -> tuple[float, float]:
    return plan.tokens_per_second, -plan.memory.total


def _rank(plan: Plan) -> tuple[bool, float]:
    """The fastest that fits comes first, and what fits nowhere last, the smallest of it before the
    others.
    """
    return not plan.fits, -plan.tokens_per_second if plan.fits else plan.memory.total


def _no_layout(
    shape: ModelShape, cluster: Cluster, work: Work, strategies: Sequence[str]
) -> UserError:
    """What to change if not a single layout exists: the strategy, the micro-batch or the global
    batch.
    """
    names, rows = ", ".join(strategies), f"{work.rows} rows of {work.seq_len} tokens"
    layouts = [layout for strategy in strategies for layout in layouts_of(shape, cluster, strategy)]
    if not layouts:
        return UserError(
            f"--strategy {names}: has no layout of {shape.name} on {cluster.name}; omit it to see "
            "others",
            code="plan-no-layout",
        )
    any_size = replace(work, micro_batch=None)
    sizes = {
        batch.micro_batch for layout in layouts for batch in with_batches(shape, layout, any_size)
    }
    if sizes:
        fitting = ", ".join(map(str, sorted(sizes)))
        return UserError(
            f"--micro_batch {work.micro_batch}: does not fill a global batch of {rows}; use one "
            f"of {fitting}",
            code="uneven-split",
        )
    return UserError(
        f"--batch_tokens {work.rows * work.seq_len}: {rows} cannot be divided evenly over "
        f"{cluster.gpus} GPUs by "
        f"{names}; use a multiple of {cluster.gpus * work.seq_len}",
        code="uneven-split",
    )


def no_layout_fits(answer: Answer) -> UserError:
    """What the closest plan lacks."""
    closest = answer.plans[0]
    missing = (closest.memory.total - closest.cluster.usable_memory) / GIB
    return UserError(
        f"--model {answer.shape.name} on {answer.cluster.name}: no layout fits; the closest, "
        f"{closest.layout.name}, "
        f"lacks {missing:,.1f} GiB per GPU (simulated: {closest.reason}); use more GPUs, larger "
        "ones or a "
        "smaller --batch_tokens",
        code="plan-does-not-fit",
    )


def tokens_of_run(
    shape: ModelShape, cluster: Cluster, seq_len: int, days: float, utilisation: float
) -> float:
    """Tokens that one GPU gets through in ``days`` at a ``utilisation`` of its peak by the model's
    own operations.
    """
    peak = max(cluster.gpu.peak_flops.values())
    return utilisation * peak * days * 86_400 / (3 * shape.forward_flops(seq_len) / seq_len)


def launch_command(shape: ModelShape, layout: Layout, cluster: Cluster) -> str | None:
    """The command that trains with a layout, the same on each node; ``$HEAD`` is the first node's
    name.
    """
    if cautions(shape, layout):
        return None
    per_node = min(layout.ranks, cluster.gpus_per_node)
    launcher = f"torchrun --nproc_per_node={per_node} training/train_ddp.py"
    if layout.ranks == 1:
        launcher = "python training/train_single.py"
    elif layout.ranks > per_node:
        launcher = (
            f"torchrun --nnodes={layout.ranks // per_node} --nproc_per_node={per_node} "
            "--rdzv_backend=c10d --rdzv_endpoint=$HEAD:29500 training/train_ddp.py"
        )
    return f"{launcher} {shlex.join(training_flags(shape, layout))}"


def training_flags(shape: ModelShape, layout: Layout) -> list[str]:
    """The trainer's flags for a layout, without those that would repeat a default."""
    facts, checkpointing = STRATEGY_FACTS[layout.strategy], layout.activation_checkpointing
    # Name, value, and whether it is needed.
    flags = (
        ("task", DECODER_TASK, shape.num_labels is None),
        ("model", shape.source, True),
        ("strategy", layout.strategy, True),
        ("dp_shard", layout.dp_shard, facts.shards and layout.dp_replicate > 1),
        ("tp", layout.tp, facts.tensor),
        ("pp", layout.pp, facts.pipeline),
        ("pp_schedule", layout.schedule, layout.pp > 1),
        ("batch_size", layout.micro_batch, True),
        ("gradient_accumulation", layout.accumulation, True),
        ("max_length", layout.seq_len, True),
        ("precision", layout.precision, True),
        ("activation_checkpointing", checkpointing, checkpointing != "none"),
        ("sequence_parallel", "true", layout.sequence_parallel),
    )
    needed = ((name, value) for name, value, is_needed in flags if is_needed)
    return [part for name, value in needed for part in (f"--{name}", str(value))]


def cautions(shape: ModelShape, layout: Layout) -> list[str]:
    """Why there is no launch command; nothing if there is one."""
    if not shape.source:
        unknown = [
            f"No command: only the dimensions of {shape.name} are known. Give --model a folder "
            "that holds a "
            "config.json and weights (safetensors) to get one."
        ]
        if shape.split_elsewhere and (layout.tp > 1 or layout.pp > 1):
            unknown.append(
                f"This trainer does not split the network of {shape.name}: layouts with tp or pp "
                "are for programs "
                "that do, such as Megatron-LM, and are planned with this trainer's memory and "
                "schedules."
            )
        return unknown
    if not SHORTEST_TEXT <= layout.seq_len <= LONGEST_TEXT:
        return [f"No command: the trainer takes texts of {SHORTEST_TEXT} to {LONGEST_TEXT} tokens."]
    if shape.num_labels is None and shape.tied_embeddings and (layout.tp > 1 or layout.pp > 1):
        return [
            (
                "No command: the trainer cannot split a language model whose head is its "
                "embedding table; use zero3."
            )
        ]
    return []
