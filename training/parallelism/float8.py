"""The blocks' matrix products in float8 with one scale per tensor, through torchao; weights stay in
their precision.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433; torchao's
``float8/README.md``.
"""

from __future__ import annotations

import torch
from torch import nn

from common.errors import UserError
from training.config import TrainConfig

LEAST_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
SIDE_MULTIPLE = 16  # of both sides of a weight, for the tensor cores


def check_float8(config: TrainConfig, device: torch.device, precision: str) -> None:
    """Check that this run can compute in float8.

    Raises:
        UserError: no float8 on the device, not in bf16 otherwise, with tensor parallelism, or
            torchao is not installed.
    """
    needs = "needs a GPU of compute capability 8.9 or more (Ada, Hopper or newer)"
    if device.type != "cuda":
        raise UserError(
            f"--float8: {needs}, and this run is on the CPU", code="precision-unsupported"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UserError(
            f"--float8: {needs}, and {name} has {'.'.join(map(str, capability))}",
            code="precision-unsupported",
        )
    if precision != "bf16":
        raise UserError(
            f"--float8 with --precision {precision}: what is not in float8 is in bf16; use bf16 "
            "or auto",
            code="flags-conflict",
        )
    if config.strategy == "tp" or config.tp > 1:
        raise UserError(
            "--float8 with --tp: split matrices are not computed in float8; use --strategy zero2 "
            "or zero3",
            code="flags-conflict",
        )
    try:
        import torchao  # noqa: F401
    except ImportError as error:
        raise UserError(
            f'--float8: torchao is not installed ({error}); pip install "distrinews[float8]"',
            code="package-missing",
        ) from error


def apply_float8(block: nn.Module, *, emulate: bool = False) -> None:
    """Compute a block's linear layers in float8, in place, before it is compiled or sharded;
    parameter names do not change.

    Layers with a side that is not a multiple of 16 are left alone. ``emulate`` rounds the same way
    in fp32 arithmetic, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        block,
        # The inner side of a weight's gradient is rows times tokens, which may be any number.
        config=Float8LinearConfig(pad_inner_dim=True, emulate=emulate),
        module_filter_fn=lambda module, _: all(
            side % SIDE_MULTIPLE == 0 for side in module.weight.shape
        ),
    )
