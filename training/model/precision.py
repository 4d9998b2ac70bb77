"""Numeric precision: fp32, bf16 or fp16 with a loss scale."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from common.errors import UserError, first_line

TIMED_SIZE, TIMINGS = 512, 5  # of the matrices whose product is timed, and how often
WORTH_IT = 1.2  # bf16 has to be this many times as fast to be worth its rounding
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cpu_has_bf16() -> bool:
    """Whether this CPU has instructions for bf16 products (AMX or AVX512-BF16)."""
    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


@cache
def cpu_gains_by_bf16() -> bool:
    """Whether this CPU multiplies bf16 faster than fp32, measured in about 20 ms.

    Having the instructions is not enough: an AMD EPYC from 2022 is twice as fast with AVX512-BF16,
    but a Xeon from 2023 with AMX switched off is only half as fast.
    """
    if not cpu_has_bf16():
        return False
    seconds = dict.fromkeys((torch.float32, torch.bfloat16), math.inf)
    # The fastest of several rounds, taking turns, so that a moment of load does not decide.
    for _ in range(1 + TIMINGS):
        for dtype in seconds:
            matrix = torch.ones(TIMED_SIZE, TIMED_SIZE, dtype=dtype)
            start = time.perf_counter()
            torch.mm(matrix, matrix)
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - start)
    return seconds[torch.bfloat16] * WORTH_IT < seconds[torch.float32]


def choose_precision(asked: str, device: torch.device) -> str:
    """Resolve ``auto``, and refuse what the device does not support.

    Raises:
        UserError: fp16 on a CPU, or bf16 on a GPU without it.
    """
    if device.type == "cpu":
        if asked == "fp16":
            raise UserError(
                "--precision fp16: trains on GPUs only, and this run is on the CPU; use fp32 or "
                "bf16",
                code="precision-unsupported",
            )
        return ("bf16" if cpu_gains_by_bf16() else "fp32") if asked == "auto" else asked
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if asked == "bf16" and not has_bf16:
        raise UserError(
            f"--precision bf16: {torch.cuda.get_device_name(device)} has no bf16; use fp16 or auto",
            code="precision-unsupported",
        )
    return ("bf16" if has_bf16 else "fp16") if asked == "auto" else asked


def allow_tf32(*, wanted: bool, device: torch.device) -> None:
    """Let fp32 matrix products on GPUs round their inputs to TF32."""
    # On CPUs the same setting would mean bf16.
    torch.set_float32_matmul_precision("high" if wanted and device.type == "cuda" else "highest")


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, DTYPES[precision])


@torch.no_grad()
def why_not_in_half(device_type: str, compute: Callable[[], torch.Tensor]) -> str:
    """Why a network's own code fails in half precision; empty if it does not.

    bf16 stands for fp16 too, for which a CPU lacks many operations.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.autocast(device_type, torch.bfloat16):
            found = compute()
    except Exception as error:  # of any kind
        return first_line(error)
    return "" if bool(torch.isfinite(found).all()) else "it gives values that are not finite"


class LossScale:
    """Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740, section 3.2), so that fp16
    gradients do not vanish.

    Whether gradients overflowed shows in their global norm, which every rank knows anyway. So all
    ranks decide alike without another collective.
    """

    FIRST = 2.0**16
    GROWS_AFTER = 2000  # good steps in a row
    LEAST = 2.0**-14  # gradients that overflow even so would overflow in fp32, or are NaN

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = self.FIRST if enabled else 1.0
        self.good_steps = 0

    def update(self, *, finite: bool) -> None:
        if not self.enabled:
            return
        # Halve on overflow, and double after many good steps: the scale stays just below where
        # gradients overflow.
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_steps == self.GROWS_AFTER:
            self.scale, self.good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps} if self.enabled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Resume from a checkpoint; if that was not trained in fp16, the scale starts at its first
        value.
        """
        if self.enabled and state:
            self.scale, self.good_steps = state["scale"], int(state["good_steps"])
