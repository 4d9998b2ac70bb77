"""The table of what the equivalence suite proved, written between two marks of a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from common.files import write_whole
from common.hardware import cpu_name
from tests.training.parallelism.cases import Case, Differences

BEGIN, END = "<!-- proofs: begin -->", "<!-- proofs: end -->"
FIGURES = ("loss", "gradients", "weights", "grad_norm", "evaluation")


@dataclass(frozen=True)
class Proof:
    """A case that passed, and how far from one process it was."""

    case: Case
    differences: Differences


def write_proofs(page: Path, proofs: list[Proof], tolerances: dict[str, dict[str, float]]) -> None:
    """Put the table between the marks of ``page``; what stood there goes."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    write_whole(page, f"{before}{BEGIN}\n{_table(proofs, tolerances)}{END}{after}".encode())


def _table(proofs: list[Proof], tolerances: dict[str, dict[str, float]]) -> str:
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, gloo, {cpu_name()}"
    lines = [
        f"{len(proofs)} layouts, each compared with one process: {versions}. Figures are relative differences.",
        "",
        "| ranks | flags | model | accumulation | in | loss | gradients | weights | gradient norm | evaluation |",
        "| ---: | --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for proof in proofs:
        case = proof.case
        flags = " ".join(f"--{name} {str(value).lower()}" for name, value in case.fields.items())
        figures = " | ".join(f"{getattr(proof.differences, name):.0e}" for name in FIGURES)
        model = f"{case.family}, {case.layers} blocks"
        lines.append(
            f"| {case.world_size} | `{flags}` | {model} | {case.accumulation} | {case.precision} | {figures} |"
        )
    limits = [
        f"{precision} " + ", ".join(f"{name.replace('_', ' ')} {limit:.0e}" for name, limit in limits.items())
        for precision, limits in tolerances.items()
    ]
    return "\n".join([*lines, "", f"Tolerances: {'; '.join(limits)}.", ""])
