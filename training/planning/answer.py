"""Answer: the best way to train a model on a cluster, how it scales up to there, and what its checkpoint costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.errors import UserError
from training.planning.calibration import COPY_BANDWIDTH, HASH_BANDWIDTH, STORAGE_BANDWIDTH
from training.planning.hardware import GIB, Cluster
from training.planning.layouts import STRATEGIES, Work, degrees, divisors, with_batches
from training.planning.plan import Plan, make_plan, plan_memory, usable_memory
from training.planning.shapes import ModelShape, StrategyName

CHECKPOINT_BYTES = 12  # a parameter and its two moments, fp32


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of weights and moments, of which each rank writes its part while training goes on.

    ``copy``, ``write``, ``hash``: seconds. Training waits only for the copy. Writing and hashing run beside it and
    need processor time, which matters only if training runs on those processors too.
    """

    bytes: float
    copy: float
    write: float
    hash: float

    @property
    def seconds(self) -> float:
        """Until it is complete."""
        return self.copy + self.write + self.hash


@dataclass(frozen=True)
class Answer:
    """All plans of one question.

    ``plans``: the best of each strategy and product of degrees, the fitting ones first, the fastest first.
    ``scaling``: the best plan for 1, 2, 4 ... GPUs with as many tokens per GPU; None if nothing fits.
    """

    shape: ModelShape
    cluster: Cluster
    work: Work
    plans: list[Plan]
    scaling: dict[int, Plan | None]
    checkpoint: Checkpoint
    target_tokens: float | None

    @property
    def best(self) -> list[Plan]:
        """The three fastest that fit."""
        return [plan for plan in self.plans if plan.fits][:3]

    def efficiency(self, plan: Plan) -> float | None:
        """Tokens per second and GPU, divided by those of one GPU; None if one GPU cannot hold the model."""
        alone = self.scaling.get(1)
        return alone and plan.tokens_per_second / plan.layout.ranks / alone.tokens_per_second


def answer(
    shape: ModelShape,
    cluster: Cluster,
    work: Work,
    strategies: Sequence[StrategyName] = STRATEGIES,
    target_tokens: float | None = None,
) -> Answer:
    """Plan every layout of ``strategies``.

    Raises:
        UserError: none of them lies over so many GPUs, or shares out the global batch.
    """
    plans = best_plans(shape, cluster, work, strategies)
    if not plans:
        raise _no_layout(shape, cluster, work, strategies)
    scaling = _scaling(shape, cluster, work, strategies, plans)
    return Answer(shape, cluster, work, plans, scaling, estimate_checkpoint(shape, cluster), target_tokens)


def _no_layout(shape: ModelShape, cluster: Cluster, work: Work, strategies: Sequence[StrategyName]) -> UserError:
    """What to change where not one layout exists: the strategy, the micro-batch or the global batch."""
    names, rows = ", ".join(strategies), f"{work.rows} rows of {work.seq_len} tokens"
    layouts = [layout for strategy in strategies for layout in degrees(shape, cluster, strategy)]
    if not layouts:
        return UserError(
            f"--strategy {names}: has no layout of {shape.name} on {cluster.name}; leave it out to see others",
            code="plan-no-layout",
        )
    any_size = replace(work, micro_batch=None)
    sizes = {batch.micro_batch for layout in layouts for batch in with_batches(shape, layout, any_size)}
    if sizes:
        fitting = ", ".join(map(str, sorted(sizes)))
        return UserError(
            f"--micro_batch {work.micro_batch}: does not fill a global batch of {rows}; take one of {fitting}",
            code="uneven-split",
        )
    return UserError(
        f"--batch_tokens {work.rows * work.seq_len}: {rows} cannot be split evenly over {cluster.gpus} GPUs by "
        f"{names}; take a multiple of {cluster.gpus * work.seq_len}",
        code="uneven-split",
    )


def best_plans(shape: ModelShape, cluster: Cluster, work: Work, strategies: Sequence[StrategyName]) -> list[Plan]:
    """For each strategy and product of degrees the fastest plan that fits (of equals the smallest), or the closest."""
    found = []
    for strategy in strategies:
        for layout in degrees(shape, cluster, strategy):
            needed = {batch: plan_memory(shape, batch, cluster).total for batch in with_batches(shape, layout, work)}
            fitting = [batch for batch, total in needed.items() if total <= usable_memory(cluster)]
            if fitting:
                plans = [make_plan(shape, batch, cluster) for batch in fitting]
                found.append(max(plans, key=lambda plan: (plan.tokens_per_second, -plan.memory.total)))
            elif needed:
                found.append(make_plan(shape, min(needed, key=lambda batch: needed[batch]), cluster))
    return sorted(found, key=lambda plan: (not plan.fits, -plan.tokens_per_second if plan.fits else plan.memory.total))


def _scaling(
    shape: ModelShape, cluster: Cluster, work: Work, strategies: Sequence[StrategyName], plans: list[Plan]
) -> dict[int, Plan | None]:
    """The best plan for each number of GPUs that fills whole nodes or divides one, up to all."""
    found: dict[int, Plan | None] = {}
    for gpus in divisors(cluster.gpus):
        if cluster.gpus_per_node % gpus and gpus % cluster.gpus_per_node:
            continue
        rows = work.rows * gpus // cluster.gpus
        here = min(gpus, cluster.gpus_per_node)
        smaller = replace(cluster, nodes=gpus // here, gpus_per_node=here)
        share = plans if gpus == cluster.gpus else []
        if rows and not share:
            # One GPU is the plainest strategy's, whatever was asked for.
            asked = strategies if gpus > 1 else ("ddp",)
            share = best_plans(shape, smaller, replace(work, rows=rows), asked)
        found[gpus] = next((plan for plan in share if plan.fits), None)
    return found


def estimate_checkpoint(shape: ModelShape, cluster: Cluster) -> Checkpoint:
    """What training/checkpointing does: each rank copies its share to the machine's memory, writes and hashes it."""
    size = CHECKPOINT_BYTES * shape.num_parameters
    share = size / (cluster.nodes * cluster.gpus_per_node)
    return Checkpoint(size, share / COPY_BANDWIDTH, size / cluster.nodes / STORAGE_BANDWIDTH, share / HASH_BANDWIDTH)


def tokens_of_run(shape: ModelShape, cluster: Cluster, seq_len: int, days: float, utilisation: float) -> float:
    """Tokens that one GPU gets through in ``days`` at a ``utilisation`` of its peak by the model's own operations."""
    peak = max(cluster.gpu.peak_flops.values())
    return utilisation * peak * days * 86_400 / (3 * shape.forward_flops(seq_len) / seq_len)


def no_layout_fits(answer: Answer) -> UserError:
    """What is missing where no plan fits, by the one that lacks least."""
    closest = answer.plans[0]
    missing = (closest.memory.total - closest.available) / GIB
    return UserError(
        f"--model {answer.shape.name} on {answer.cluster.name}: no layout fits; the closest, {describe(closest)}, "
        f"lacks {missing:,.1f} GiB per GPU (simulated: {closest.reason}); take more GPUs, larger ones or a "
        "smaller --batch_tokens",
        code="plan-does-not-fit",
    )


def describe(plan: Plan) -> str:
    """A layout in a few words: its strategy and the degrees above 1."""
    layout = plan.layout
    names = {"pp": layout.pp, "replicate": layout.dp_replicate, "shard": layout.dp_shard, "tp": layout.tp}
    parts = [f"{name} {degree}" for name, degree in names.items() if degree > 1]
    return f"{layout.strategy} ({' x '.join(parts)})" if parts else layout.strategy
