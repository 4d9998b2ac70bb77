"""Every strategy, on real ranks, computes what one process computes; and goes on from any other's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes import here, run_on_ranks
from tests.training.parallelism.cases import ALONE, Case, compare
from tests.training.parallelism.proofs import Proof, write_proofs
from tests.training.parallelism.saved_states import whole_state
from tests.training.parallelism.small_runs import take_steps

# How far from one process, relative to the norm of all; weights after four steps.
TOLERANCES = {
    "fp32": {"loss": 1e-6, "gradients": 1e-6, "weights": 1e-6, "grad_norm": 1e-6, "evaluation": 1e-5},
    "bf16": {"loss": 2e-2, "gradients": 1e-1, "weights": 1e-2, "grad_norm": 5e-2, "evaluation": 5e-2},
}
FULL, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
DDP, ZERO1 = {"strategy": "ddp"}, {"strategy": "zero1"}
ZERO2, ZERO3 = {"strategy": "zero2"}, {"strategy": "zero3"}
TP, PP, ALL = {"strategy": "tp"}, {"strategy": "pp"}, {"strategy": "3d"}
SEQUENCE = {"sequence_parallel": True}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")


def _data_parallel() -> list[Case]:
    layouts = [DDP, ZERO1, ZERO2, ZERO3, ZERO3 | {"cpu_offload": True}, ZERO2 | SELECTIVE, ZERO3 | FULL]
    cases = [Case(2, fields, accumulation=accumulation) for fields in layouts for accumulation in (1, 3)]
    cases += [Case(4, fields, family) for fields in layouts[:4] for family in ("distilbert", "llama")]
    hybrid = [ZERO2 | {"dp_shard": 2}, ZERO3 | {"dp_shard": 2}, ZERO3 | {"dp_shard": 1}]
    cases += [Case(4, fields, accumulation=accumulation) for fields in hybrid for accumulation in (1, 2)]
    cases += [Case(8, fields) for fields in (DDP, ZERO1, ZERO2, ZERO3, ZERO3 | {"dp_shard": 4})]
    return [*cases, Case(3, ZERO3), *(Case(2, fields, precision="bf16") for fields in (DDP, ZERO3))]


def _tensor_parallel() -> list[Case]:
    families = ("distilbert", "bert", "llama")
    cases = [Case(2, TP | more, family) for more in ({}, SEQUENCE) for family in families]
    cases += [Case(4, TP | more, family, accumulation=2) for more in ({}, SEQUENCE) for family in families]
    cases += [Case(2, TP | FULL, accumulation=3), Case(2, TP | SEQUENCE | SELECTIVE), Case(2, TP, precision="bf16")]
    cases += [
        Case(4, ALL | {"tp": 2} | more, family) for more in ({}, {"dp_shard": 1}, SEQUENCE) for family in families
    ]
    return [*cases, Case(8, ALL | {"tp": 2, "dp_shard": 2}), Case(8, ALL | {"tp": 4}, "llama", accumulation=2)]


def _pipelined() -> list[Case]:
    cases = [
        Case(2, PP | {"pp_schedule": schedule}, family, accumulation=4)
        for schedule in SCHEDULES
        for family in ("distilbert", "llama")
    ]
    cases += [Case(4, PP | {"pp_schedule": schedule}, accumulation=4, layers=8) for schedule in SCHEDULES]
    cases += [Case(2, PP | FULL | {"pp_schedule": schedule}, accumulation=4) for schedule in ("1f1b", "zbv")]
    cases += [Case(2, PP | SELECTIVE, "bert", accumulation=2)]
    cases += [Case(4, ALL | {"pp": 2} | more, accumulation=4) for more in ({}, {"dp_shard": 1})]
    cases += [Case(4, ALL | {"pp": 2, "tp": 2}, family, accumulation=2) for family in ("distilbert", "bert", "llama")]
    whole = {"pp": 2, "tp": 2}
    cases += [Case(8, ALL | whole | more, accumulation=2) for more in ({}, {"dp_shard": 1}, SEQUENCE, FULL)]
    cases += [Case(8, ALL | whole | {"pp_schedule": "zbv"}, "llama", accumulation=4)]
    cases += [Case(8, ALL | {"pp": 2, "dp_shard": 2}, accumulation=2), Case(8, PP, accumulation=8, layers=8)]
    return [*cases, Case(2, PP, accumulation=2, precision="bf16")]


CASES = [*_data_parallel(), *_tensor_parallel(), *_pipelined()]
FAST = [
    Case(2, ZERO3, accumulation=3),
    Case(2, TP),
    Case(2, PP | {"pp_schedule": "1f1b"}, "llama", accumulation=4),
]


@pytest.fixture(scope="module")
def proofs(request: pytest.FixtureRequest) -> Any:
    """Collects what was proven; with --write_proofs a page's table is made of it."""
    collected: list[Proof] = []
    yield collected
    if page := request.config.getoption("--write_proofs"):
        write_proofs(Path(page), collected, TOLERANCES)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in FAST else pytest.mark.slow, id=str(c)) for c in CASES]
)
def test_a_layout_computes_what_one_process_computes(case: Case, proofs: list[Proof]) -> None:
    differences = run_on_ranks(case.world_size, compare, case)[0]

    tolerance = TOLERANCES[case.precision]
    beyond = {name: value for name, value in vars(differences).items() if value > tolerance[name]}
    assert not beyond
    proofs.append(Proof(case, differences))


LAYOUTS = {
    "ddp": DDP,
    "zero1": ZERO1,
    "zero2": ZERO2,
    "zero3": ZERO3,
    "tp": TP,
    "pp": PP,
    "3d": ALL | {"pp": 2, "tp": 2},
}


def _pass_on(names: list[str], layers: int) -> tuple[list[float], list[float]] | None:
    """The losses of a run that goes from layout to layout, a step on each; and of one process."""
    case = Case(4, {}, accumulation=4, layers=layers)
    state, losses = None, []
    for step, name in enumerate(names, start=1):
        strategy = case.strategy(here(), **LAYOUTS[name])
        if state is not None:
            strategy.load_state_dict(state)
        losses += take_steps(strategy, [step], accumulation=case.accumulation)
        state = whole_state(strategy, here())
    if not here().is_first:
        return None
    alone = case.strategy(ALONE)
    return losses, take_steps(alone, range(1, len(names) + 1), accumulation=case.accumulation, ranks=ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("first", LAYOUTS)
def test_a_checkpoint_of_each_strategy_resumes_under_every_other(first: str) -> None:
    names = [name for other in LAYOUTS for name in (first, other)]

    losses, expected = run_on_ranks(4, _pass_on, names, 4, seconds=240.0)[0]

    assert losses == pytest.approx(expected, rel=1e-5)
