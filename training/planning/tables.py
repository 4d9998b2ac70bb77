"""An answer as tables in the terminal, and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from training.planning.hardware import GIB
from training.planning.largest import LargestAnswer
from training.planning.memory import host_memory
from training.planning.models import ModelShape
from training.planning.plan import ROUNDING, Answer, Plan, checkpoint_cost, largest_part

MOST_ROWS = 12
FIRST_ROWS = 5  # without --details
FULL_LAYOUT = "layout, rows x micro-batches"
NO_EFFICIENCY = (
    "Share of ideal: against GPUs that could hold the whole model and never had to communicate. An "
    "efficiency against 1 GPU does not exist, because the model does not fit on 1."
)
WIDTH_OUTSIDE_TERMINALS = 150


def _console() -> Console:
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH_OUTSIDE_TERMINALS
    return console


@dataclass(frozen=True)
class _Table:
    """A table of simulated figures; one without rows is not printed."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def print(self, console: Console) -> None:
        if not self.rows:
            return
        title = f"{self.title} (simulated)"
        table = Table(title=title, title_justify="left", title_style="bold", box=None)
        for column, name in enumerate(self.header):
            cells = [row[column] for row in self.rows if row[column]]
            has_figures = column > 0 and all(cell[0].isdigit() for cell in cells)
            table.add_column(name, justify="right" if has_figures else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        console.print()
        console.print(table)
        for note in self.notes:
            console.print(note, style="dim")


def _count(parameters: int) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:,.1f} billion"
    return f"{parameters / 1e6:,.0f} million"


def print_largest(families: Sequence[LargestAnswer]) -> None:
    console = _console()
    cluster = families[0].cluster
    console.print(
        f"The largest models that fit {cluster.name}; every figure is simulated", style="bold"
    )
    model = ("strategy", "parameters", "layers x hidden", "fastest layout")
    header = (*model, "GiB", "tokens/s", "what stops one more layer")
    for family in families:
        work, rows, nothing = family.work, [], []
        for one in family.found:
            obstacle = _obstacle(one.too_large) if one.too_large else ""
            if one.plan is None:
                nothing.append(f"{one.strategy} ({obstacle or 'no layout'})")
                continue
            shape, layout = one.plan.shape, one.plan.layout
            size = (_count(shape.num_parameters), f"{shape.layers} x {shape.hidden:,}")
            how = layout.full_name.removeprefix(layout.strategy).lstrip(" ,")
            figures = (_gib(one.plan.memory.total), f"{one.plan.tokens_per_second:,.0f}")
            rows.append((one.strategy, *size, how, *figures, obstacle))
        notes = [f"Nothing fits under {', '.join(nothing)}."] if nothing else []
        notes.append(
            f"{work.rows * work.seq_len:,} tokens per step ({work.rows:,} rows of "
            f"{work.seq_len:,}) in "
            f"{work.precision}. Of each GPU, {_gib(cluster.usable_memory)} GiB can be filled."
        )
        _Table(f"With the proportions of {family.shape.name}", header, rows, notes).print(console)


def _obstacle(plan: Plan) -> str:
    part, size = largest_part(plan.memory)
    return f"{part.removeprefix('the ')}: {_gib(size)} of {_gib(plan.memory.total)} GiB"


def print_answer(answer: Answer, *, details: bool) -> None:
    """Print the verdict, the fastest layouts and the command of the first; with ``details`` all of it."""
    console = _console()
    shape, work = answer.shape, answer.work
    size = _count(shape.num_parameters)
    rows = f"{work.rows:,} rows of {work.seq_len:,}"
    tokens = f"{work.rows * work.seq_len:,} tokens per step ({rows})"
    console.print(f"{shape.name} ({size} parameters) on {answer.cluster.name}", style="bold")
    console.print(f"{tokens} in {work.precision}; every figure is simulated", style="bold")
    console.print(_summary(answer))
    if details:
        for table_of in (_layouts, _memory, _time, _traffic, _misfits, _scaling, _whole_run):
            table_of(answer).print(console)
    else:
        _fastest(answer).print(console)
    commands = [(plan.layout.full_name, plan.launch) for plan in answer.best if plan.launch]
    commands = commands if details else commands[:1]
    if commands:
        console.print("\nTo launch the best", style="bold")
    for name, command in commands:
        console.print(f"# {name}", style="dim")
        console.print(command, soft_wrap=True)
    for warning in answer.warnings:
        console.print(warning, style="yellow")
    if not details:
        console.print(
            "\n--details: where memory and time go, what does not fit, and how it scales."
        )


def _fastest(answer: Answer) -> _Table:
    """What fits into a terminal of 80 columns: how a layout runs its batch stands below its name."""
    fitting = [plan for plan in answer.plans if plan.fits]
    rows = []
    for plan in fitting[:FIRST_ROWS]:
        layout = plan.layout.full_name.replace(f"{plan.layout.name}, ", f"{plan.layout.name}\n  ")
        figures = (_gib(plan.memory.total), f"{plan.time.total:.3g}")
        rows.append((layout, *figures, f"{plan.tokens_per_second:,.0f}", f"{plan.mfu:.0%}"))
    title = f"The {len(rows)} fastest of {len(fitting)} layouts that fit"
    return _Table(title, (FULL_LAYOUT, "GiB", "s/step", "tokens/s", "MFU"), rows)


def _layouts(answer: Answer) -> _Table:
    fitting = [plan for plan in answer.plans if plan.fits]
    rows = []
    for plan in fitting[:MOST_ROWS]:
        time, speed = f"{plan.time.total:.3g}", f"{plan.tokens_per_second:,.0f}"
        shares = (f"{plan.mfu:.0%}", f"{plan.share_of_ideal:.0%}")
        rows.append((plan.layout.full_name, _gib(plan.memory.total), time, speed, *shares))
    notes = [f"Of each GPU, {_gib(answer.cluster.usable_memory)} GiB can be filled."]
    if len(fitting) > MOST_ROWS:
        notes.insert(0, f"{len(fitting) - MOST_ROWS} slower ones are left out.")
    figures = ("GiB per GPU", "s per step", "tokens/s", "MFU", "share of ideal")
    return _Table("Layouts that fit", (FULL_LAYOUT, *figures), rows, notes)


def _memory(answer: Answer) -> _Table:
    parts = ("weights", "gradients", "optimizer", "activations", "gathered, buffers")
    rows = [
        (p.layout.name, *map(_gib, asdict(p.memory).values()), _gib(p.memory.total))
        for p in answer.best
    ]
    return _Table("What fills a GPU, GiB", ("layout", *parts, "total"), rows)


def _time(answer: Answer) -> _Table:
    header = ("layout", "compute", "communication not hidden", "bubble", "optimizer", "total")
    rows = [
        (p.layout.name, *(f"{s:.3f}" for s in (*asdict(p.time).values(), p.time.total)))
        for p in answer.best
    ]
    return _Table("Where a step's time goes, s", header, rows)


def _traffic(answer: Answer) -> _Table:
    header = ("layout", "collective", "calls", "GB in the node", "GB between nodes", "s")
    rows = []
    for plan in answer.best:
        for column, transfer in enumerate(plan.transfers):
            name = "" if column else plan.layout.name
            collective = f"{transfer.collective} over {transfer.dimension}"
            in_node, between = transfer.bytes - transfer.between_nodes, transfer.between_nodes
            volume = (f"{in_node / 1e9:,.2f}", f"{between / 1e9:,.2f}")
            seconds = f"{transfer.seconds:.3f}"
            rows.append((name, collective, f"{transfer.calls:,}", *volume, seconds))
    return _Table("What a GPU sends in a step", header, rows)


def _misfits(answer: Answer) -> _Table:
    misfits = [plan for plan in answer.plans if not plan.fits]
    rows = [(plan.layout.full_name, plan.reason) for plan in misfits[:MOST_ROWS]]
    notes = [f"{len(misfits) - MOST_ROWS} more do not fit."] if len(misfits) > MOST_ROWS else []
    title = "Layouts that do not fit, at their smallest"
    return _Table(title, (FULL_LAYOUT, "why"), rows, notes)


def _scaling(answer: Answer) -> _Table:
    fits_on_one = answer.scaling.get(1) is not None
    rows = []
    for gpus, found in answer.scaling.items():
        if found is None:
            rows.append((str(gpus), "nothing fits", "", "", ""))
            continue
        speed = found.tokens_per_second
        kept = answer.efficiency(found) if fits_on_one else found.share_of_ideal
        speeds = (f"{speed:,.0f}", f"{speed / gpus:,.0f}")
        rows.append((str(gpus), found.layout.name, *speeds, f"{kept:.0%}"))
    measure, note = (
        ("efficiency", "Efficiency: the tokens/s per GPU, divided by those of 1 GPU.")
        if fits_on_one
        else ("share of ideal", NO_EFFICIENCY)
    )
    plans = filter(None, answer.scaling.values())
    if any((answer.efficiency(plan) or 0) > 1 + ROUNDING for plan in plans):
        note += (
            " More than 100%: 1 GPU updates all weights in every step, each of these only its "
            "shard of them."
        )
    header = ("GPUs", "best layout", "tokens/s", "tokens/s per GPU", measure)
    title = f"From 1 to {answer.cluster.gpus} GPUs, with equal token counts per GPU"
    return _Table(title, header, rows, [note])


def _whole_run(answer: Answer) -> _Table:
    saved = checkpoint_cost(answer.shape, answer.cluster)
    host = host_memory(answer.shape, answer.cluster)
    rows = []
    if answer.target_tokens and answer.best:
        target = answer.target_tokens
        days = (f"{plan.days(target):,.2f} ({plan.layout.name})" for plan in answer.best)
        rows.append((f"days for {target / 1e9:,.2f} billion tokens", ", ".join(days)))
    parts = f"then {saved['write']:,.0f} to write, {saved['hash']:,.0f} to hash"
    loading, saving = f"{host['loading'] / 1e9:,.0f} GB", f"{host['saving'] / 1e9:,.0f} GB"
    rows += [
        ("checkpoint", f"{saved['bytes'] / 1e9:,.1f} GB, of which each rank writes its shard"),
        ("seconds that training waits for it", f"{saved['copy']:,.1f}, for the copy"),
        ("seconds until it is complete", f"{saved['seconds']:,.0f} ({parts})"),
        ("memory of a machine while loading", f"{loading}, the model's file once for all ranks"),
        ("memory of a machine while saving", f"{saving}, with the finished model on rank 0's"),
    ]
    return _Table("A whole run", ("what", "simulated"), rows)


def _summary(answer: Answer) -> str:
    summary = f"{sum(plan.fits for plan in answer.plans)} of {len(answer.plans)} layouts fit."
    if not answer.best:
        return summary
    best, saved = answer.best[0], checkpoint_cost(answer.shape, answer.cluster)
    efficiency = answer.efficiency(best)
    speed = f"{best.share_of_ideal:.0%} of the ideal speed"
    if efficiency:
        speed = f"an efficiency of {efficiency:.0%}"
    summary += (
        f" The fastest, {best.layout.full_name}, reaches {best.tokens_per_second:,.0f} tokens per "
        "second, an MFU of "
        f"{best.mfu:.0%} and {speed}."
    )
    if answer.target_tokens:
        days = best.days(answer.target_tokens)
        summary += (
            f" It needs {days:,.2f} days for {answer.target_tokens / 1e9:,.2f} billion tokens."
        )
    waited = f"training waits for {saved['copy']:,.1f} s of that"
    return f"{summary} A checkpoint takes {saved['seconds']:,.0f} s to complete; {waited}."


def _gib(size: float) -> str:
    """Bytes as GiB, with three significant digits or two decimals."""
    return f"{size / GIB:,.2f}" if size < 10 * GIB else f"{size / GIB:,.1f}"


def _plan_record(plan: Plan) -> dict[str, Any]:
    return {
        "layout": asdict(plan.layout),
        "fits": plan.fits,
        "reason": plan.reason,
        "memory": asdict(plan.memory)
        | {"total": plan.memory.total, "available": plan.cluster.usable_memory},
        "transfers": [asdict(transfer) for transfer in plan.transfers],
        "time": asdict(plan.time) | {"total": plan.time.total},
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "share_of_ideal": plan.share_of_ideal,
        "launch": plan.launch if plan.fits else None,
    }


def _shape_record(shape: ModelShape) -> dict[str, Any]:
    return asdict(shape) | asdict(shape.traits) | {"num_parameters": shape.num_parameters}


def largest_record(family: LargestAnswer) -> dict[str, Any]:
    """A family's largest models by strategy; null where nothing fits."""
    return {
        "simulated": True,
        "proportions_of": family.shape.name,
        "cluster": asdict(family.cluster),
        "work": asdict(family.work),
        "largest": {
            one.strategy: one.plan
            and {"shape": _shape_record(one.plan.shape), **_plan_record(one.plan)}
            | {"one_layer_more": one.too_large and one.too_large.reason}
            for one in family.found
        },
    }


def as_record(answer: Answer) -> dict[str, Any]:
    """Everything that was predicted, in bytes, seconds and shares."""

    def record(plan: Plan) -> dict[str, Any]:
        return _plan_record(plan) | {"efficiency": answer.efficiency(plan)}

    shape = answer.shape
    return {
        "simulated": True,
        "shape": _shape_record(shape),
        "cluster": asdict(answer.cluster),
        "work": asdict(answer.work),
        "plans": [record(plan) for plan in answer.plans],
        "scaling": {str(gpus): plan and record(plan) for gpus, plan in answer.scaling.items()},
        "checkpoint": checkpoint_cost(shape, answer.cluster),
        "host_memory": host_memory(shape, answer.cluster),
        "target_tokens": answer.target_tokens,
    }
