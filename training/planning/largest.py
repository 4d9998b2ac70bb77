"""The largest model of a family that a cluster can train under each strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm

from training.planning.hardware import Cluster
from training.planning.layouts import Work, layouts_of, with_batches
from training.planning.models import ModelShape
from training.planning.plan import Plan, best_plans, plan_memory

HEADS_STEP = 8  # so that eight tensor-parallel ranks can share the heads of every size


@dataclass(frozen=True)
class Largest:
    """The largest model under one strategy, with its fastest layout, and one that is a layer deeper
    and does not fit.

    ``plan`` is None if not even the smallest fits; both are None if the strategy has no layout on
    the cluster.
    """

    strategy: str
    plan: Plan | None
    too_large: Plan | None


@dataclass(frozen=True)
class LargestAnswer:
    """The largest models of one family, by strategy."""

    shape: ModelShape  # whose proportions the family has
    cluster: Cluster
    work: Work
    found: list[Largest]


def scaled(shape: ModelShape, width: int, extra_layers: int = 0) -> ModelShape:
    """A model of the same proportions as ``shape``, ``width`` steps of heads wide.

    Head width, vocabulary, and the ratios of layers and of the feed-forward to the hidden size stay
    as they are. ``extra_layers`` make it deeper than its proportions.
    """
    # Then the number of key-value heads stays too, as in Llama 3.
    is_grouped = shape.kv_heads < shape.heads
    heads = width * heads_step(shape)
    hidden = heads * shape.head_dim
    layers = max(1, round(shape.layers * hidden / shape.hidden)) + extra_layers
    intermediate = round(shape.intermediate * hidden / shape.hidden / HEADS_STEP) * HEADS_STEP
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "intermediate": intermediate}
    kv_heads = shape.kv_heads if is_grouped else heads
    return replace(shape, name=f"{shape.name}-shaped", kv_heads=kv_heads, source="", **sizes)


def heads_step(shape: ModelShape) -> int:
    return lcm(HEADS_STEP, shape.kv_heads) if shape.kv_heads < shape.heads else HEADS_STEP


def largest_model(shape: ModelShape, cluster: Cluster, work: Work, strategy: str) -> Largest:
    """The largest model of the shape's family of which some layout of a strategy fits.

    Two bisections, because what a layout needs grows with the width and with the depth: first the
    widest model of the family's proportions that fits, then as many more layers as fit at that
    width.
    """

    def fits(model: ModelShape) -> bool:
        return any(
            plan_memory(model, batch, cluster).total <= cluster.usable_memory
            for layout in layouts_of(model, cluster, strategy)
            for batch in with_batches(model, layout, work)
        )

    def best(model: ModelShape) -> Plan | None:
        return next(iter(best_plans(model, cluster, work, (strategy,))), None)

    width = _last(lambda width: fits(scaled(shape, width)))
    if not width:
        return Largest(strategy, None, best(scaled(shape, 1)))
    extra = _last(lambda extra: fits(scaled(shape, width, extra)))
    largest, too_large = (best(scaled(shape, width, more)) for more in (extra, extra + 1))
    return Largest(strategy, largest, too_large)


def _last(holds: Callable[[int], bool]) -> int:
    """The last number for which a condition holds that holds up to some number and never again; 0
    if for none.
    """
    # Doubling finds a number that is too large without knowing any bound, then the gap is halved.
    beyond = 1
    while holds(beyond):
        beyond *= 2
    last = beyond // 2
    while beyond - last > 1:
        middle = (last + beyond) // 2
        last, beyond = (middle, beyond) if holds(middle) else (last, middle)
    return last
