"""Sections: an answer as titled tables of text, the same for the terminal, the page and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training.planning.answer import Answer, describe
from training.planning.dry_run import DryRun
from training.planning.hardware import GIB
from training.planning.host_memory import estimate_host_memory
from training.planning.launch import cautions
from training.planning.plan import Plan
from training.planning.shapes import MemoryEstimate

# By the plan's place among the best; in words where there was none.
DryRuns = Mapping[int, "DryRun | str"]
MOST_ROWS = 12
ROUNDING = 0.005  # what whole percents do not show
EFFICIENCY = "Efficiency: the tokens/s per GPU, divided by those of 1 GPU."
ABOVE = " More than 100%: 1 GPU updates all weights in every step, each of these only its shard of them."
IDEAL = (
    "Share of ideal: against GPUs that could hold the whole model and never had to communicate. "
    "An efficiency against 1 GPU does not exist, because the model does not fit on 1."
)
PARTS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "communication": "gathered, buffers",
}
TIMES = {
    "compute": "compute",
    "communication": "communication not hidden",
    "bubble": "bubble",
    "optimizer": "optimizer",
}


@dataclass(frozen=True)
class Section:
    """A table: its title, the heads of its columns, its rows, and sentences under it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def is_figure(self, column: int) -> bool:
        """Whether a column holds figures, which stand to the right."""
        return column > 0 and all(not row[column] or row[column][0].isdigit() for row in self.rows)


def title(answer: Answer) -> str:
    """What was asked, in a line."""
    count = answer.shape.num_parameters
    size = f"{count / 1e9:,.1f} billion" if count >= 1e9 else f"{count / 1e6:,.0f} million"
    return f"{answer.shape.name} ({size} parameters) on {answer.cluster.name}"


def work_line(answer: Answer) -> str:
    """The batch, in a line."""
    work = answer.work
    tokens = work.rows * work.seq_len
    return f"{tokens:,} tokens per step ({work.rows:,} rows of {work.seq_len:,}) in {work.precision}"


def summary(answer: Answer) -> str:
    """The answer in a few sentences."""
    said = f"{sum(plan.fits for plan in answer.plans)} of {len(answer.plans)} layouts fit."
    if not answer.best:
        return said
    best = answer.best[0]
    efficiency = answer.efficiency(best)
    kept = (
        f"{best.share_of_ideal:.0%} of the ideal speed" if efficiency is None else f"an efficiency of {efficiency:.0%}"
    )
    said += (
        f" The fastest, {plan_name(best)}, reaches {best.tokens_per_second:,.0f} tokens per second, an MFU of "
        f"{best.mfu:.0%} and {kept}."
    )
    if answer.target_tokens:
        days = best.days(answer.target_tokens)
        said += f" It needs {days:,.2f} days for {answer.target_tokens / 1e9:,.2f} billion tokens."
    saved = answer.checkpoint
    return (
        f"{said} A checkpoint takes {saved.seconds:,.0f} s to complete; training waits for {saved.copy:,.1f} s of that."
    )


def sections(answer: Answer, dry_runs: DryRuns) -> list[Section]:
    """Every table of an answer; those that would be empty are left out."""
    found = [
        _fitting(answer),
        _memory(answer, dry_runs),
        _times(answer),
        _traffic(answer),
        _misfits(answer),
        _scaling(answer),
        _running(answer),
    ]
    return [section for section in found if section.rows]


def commands(answer: Answer) -> list[tuple[str, str]]:
    """Those of the best three that the trainer can launch, by name, and the command of each."""
    return [(plan_name(plan), plan.launch) for plan in answer.best if plan.launch]


def warnings(answer: Answer) -> list[str]:
    """How to read the best three, and what stands between them and their commands, each sentence once."""
    found = [text for plan in answer.best for text in cautions(plan.shape, plan.layout)]
    if any(plan.share_of_ideal > 1 + ROUNDING for plan in answer.best):
        found.append(
            "Faster than ideal: with so few tokens, a GPU with the whole model spends its time on reading weights, "
            "and each of these GPUs reads only a part of them."
        )
    return list(dict.fromkeys(found))


def plan_name(plan: Plan) -> str:
    """The layout and how it runs its batch."""
    layout = plan.layout
    extras = [f"{layout.micro_batch} x {layout.accumulation}"]
    if layout.pp > 1:
        extras.append(layout.schedule)
    if layout.sequence_parallel:
        extras.append("sequence parallel")
    if layout.activation_checkpointing != "none":
        extras.append(f"{layout.activation_checkpointing} checkpointing")
    return f"{describe(plan)}, {', '.join(extras)}"


def _fitting(answer: Answer) -> Section:
    fitting = [plan for plan in answer.plans if plan.fits]
    rows = [
        (
            plan_name(plan),
            gib(plan.memory.total),
            f"{plan.time.total:.3g}",
            f"{plan.tokens_per_second:,.0f}",
            f"{plan.mfu:.0%}",
            f"{plan.share_of_ideal:.0%}",
        )
        for plan in fitting[:MOST_ROWS]
    ]
    header = ("layout, rows x micro-batches", "GiB per GPU", "s per step", "tokens/s", "MFU", "share of ideal")
    notes = [f"{len(fitting) - MOST_ROWS} slower ones are left out."] if len(fitting) > MOST_ROWS else []
    if fitting:
        notes.append(f"Of each GPU, {gib(fitting[0].available)} GiB can be filled.")
    return Section("Layouts that fit", header, rows, notes)


def _memory(answer: Answer, dry_runs: DryRuns) -> Section:
    rows, notes = [], []
    for place, plan in enumerate(answer.best):
        rows.append((describe(plan), "formula", *_memory_cells(plan.memory)))
        found = dry_runs.get(place)
        if isinstance(found, str):
            notes.append(f"{describe(plan)}: no dry run: {found}.")
        elif found is not None:
            rows.append(("", "dry run", *_memory_cells(found.memory)))
            off = plan.memory.total / found.memory.total - 1
            notes.append(
                f"{describe(plan)}: the formula is {off:+.0%} off the dry run, which took {found.seconds:.0f} s "
                f"and {found.host_bytes / GIB:.1f} GiB of this machine."
            )
    return Section("What fills a GPU, GiB", ("layout", "by", *PARTS.values(), "total"), rows, notes)


def _memory_cells(memory: MemoryEstimate) -> list[str]:
    return [*(gib(getattr(memory, part)) for part in PARTS), gib(memory.total)]


def _times(answer: Answer) -> Section:
    rows = [
        (describe(plan), *(f"{getattr(plan.time, part):.3f}" for part in TIMES), f"{plan.time.total:.3f}")
        for plan in answer.best
    ]
    return Section("Where a step's time goes, s", ("layout", *TIMES.values(), "total"), rows)


def _traffic(answer: Answer) -> Section:
    rows = [
        (
            describe(plan) if first else "",
            f"{transfer.collective} over {transfer.dimension}",
            f"{transfer.calls:,}",
            f"{(transfer.bytes - transfer.between_nodes) / 1e9:,.2f}",
            f"{transfer.between_nodes / 1e9:,.2f}",
            f"{transfer.seconds:.3f}",
        )
        for plan in answer.best
        for first, transfer in zip([True] + [False] * 9, plan.transfers, strict=False)
    ]
    header = ("layout", "collective", "calls", "GB in the node", "GB between nodes", "s")
    return Section("What a GPU sends in a step", header, rows)


def _misfits(answer: Answer) -> Section:
    misfits = [plan for plan in answer.plans if not plan.fits]
    rows = [(plan_name(plan), plan.reason) for plan in misfits[:MOST_ROWS]]
    notes = [f"{len(misfits) - MOST_ROWS} more do not fit."] if len(misfits) > MOST_ROWS else []
    return Section("Layouts that do not fit, at their smallest", ("layout, rows x micro-batches", "why"), rows, notes)


def _scaling(answer: Answer) -> Section:
    rows = []
    for gpus, plan in answer.scaling.items():
        if plan is None:
            rows.append((str(gpus), "nothing fits", "", "", ""))
        else:
            speed = plan.tokens_per_second
            kept = f"{_speed_kept(answer, plan):.0%}"
            rows.append((str(gpus), describe(plan), f"{speed:,.0f}", f"{speed / gpus:,.0f}", kept))
    fits_on_one = answer.scaling.get(1) is not None
    header = ("GPUs", "best layout", "tokens/s", "tokens/s per GPU", "efficiency" if fits_on_one else "share of ideal")
    heading = f"From 1 to {answer.cluster.gpus} GPUs, with equally many tokens per GPU"
    note = EFFICIENCY if fits_on_one else IDEAL
    if any(plan and (answer.efficiency(plan) or 0) > 1 + ROUNDING for plan in answer.scaling.values()):
        note += ABOVE
    return Section(heading, header, rows, [note, *_goals(answer)])


def _speed_kept(answer: Answer, plan: Plan) -> float:
    """Of one GPU's speed, or of an ideal one's if the model does not fit on one."""
    efficiency = answer.efficiency(plan)
    return plan.share_of_ideal if efficiency is None else efficiency


def _goals(answer: Answer) -> list[str]:
    """Which of the goals are met, each on the numbers of GPUs that it is about."""
    found = []
    for most, goal in ((8, 0.9), (32, 0.8)):
        judged = {gpus: _speed_kept(answer, plan) for gpus, plan in answer.scaling.items() if 1 < gpus <= most and plan}
        if judged and most <= answer.cluster.gpus:
            missed = [f"{gpus} GPUs ({kept:.0%})" for gpus, kept in judged.items() if kept <= goal]
            verdict = f"missed on {', '.join(missed)}" if missed else "met wherever the model fits"
            found.append(f"The goal of over {goal:.0%} on up to {most} GPUs: {verdict}.")
    return found


def _running(answer: Answer) -> Section:
    """What a run costs: days and checkpoints."""
    saved = answer.checkpoint
    rows = []
    if answer.target_tokens and answer.best:
        days = ", ".join(f"{plan.days(answer.target_tokens):,.2f} ({describe(plan)})" for plan in answer.best)
        rows.append((f"days for {answer.target_tokens / 1e9:,.2f} billion tokens", days))
    rows.append(("checkpoint", f"{saved.bytes / 1e9:,.1f} GB, of which each rank writes its shard"))
    rows.append(("seconds that training waits for it", f"{saved.copy:,.1f}, for the copy"))
    parts = f"then {saved.write:,.0f} to write, {saved.hash:,.0f} to hash"
    rows.append(("seconds until it is complete", f"{saved.seconds:,.0f} ({parts})"))
    host = estimate_host_memory(answer.shape, answer.cluster)
    loading, saving = f"{host.loading / 1e9:,.0f} GB", f"{host.saving / 1e9:,.0f} GB"
    rows.append(("memory of a machine while loading", f"{loading}, the model's file once for all ranks"))
    rows.append(("memory of a machine while saving", f"{saving}, with the finished model on rank 0's"))
    return Section("A whole run", ("what", "simulated"), rows)


def gib(size: float) -> str:
    """Bytes as GiB, to three figures or a hundredth."""
    return f"{size / GIB:,.2f}" if size < 10 * GIB else f"{size / GIB:,.1f}"
