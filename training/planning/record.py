"""Record: an answer as plain values, for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from training.planning.answer import Answer
from training.planning.host_memory import estimate_host_memory
from training.planning.plan import Plan
from training.planning.sections import DryRuns


def as_record(answer: Answer, dry_runs: DryRuns) -> dict[str, Any]:
    """Everything that was predicted. Bytes, seconds and shares; ``dry_runs`` by the plan's place."""
    return {
        "simulated": True,
        "shape": asdict(answer.shape) | {"num_parameters": answer.shape.num_parameters},
        "cluster": asdict(answer.cluster),
        "work": asdict(answer.work),
        "plans": [_plan(answer, plan) for plan in answer.plans],
        "dry_runs": {str(place): run if isinstance(run, str) else asdict(run) for place, run in dry_runs.items()},
        "scaling": {str(gpus): plan and _plan(answer, plan) for gpus, plan in answer.scaling.items()},
        "checkpoint": asdict(answer.checkpoint) | {"seconds": answer.checkpoint.seconds},
        "host_memory": asdict(estimate_host_memory(answer.shape, answer.cluster)),
        "target_tokens": answer.target_tokens,
    }


def _plan(answer: Answer, plan: Plan) -> dict[str, Any]:
    return {
        "layout": asdict(plan.layout),
        "fits": plan.fits,
        "reason": plan.reason,
        "memory": asdict(plan.memory) | {"total": plan.memory.total, "available": plan.available},
        "transfers": [asdict(transfer) for transfer in plan.transfers],
        "time": asdict(plan.time) | {"total": plan.time.total},
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "efficiency": answer.efficiency(plan),
        "share_of_ideal": plan.share_of_ideal,
        "launch": plan.launch if plan.fits else None,
    }
