"""Gradient sync: whether the gradients are the same on all copies once they have been reduced.

They are not where a backward pass went past the wrapper that reduces them: a part of the model called directly, a
``no_sync`` left on, a parameter used after the reduction. Each copy then learns from its own rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from common.errors import TrainingFailure
from training.monitoring.divergence import first_difference
from training.parallelism.distributed import Ranks


def check_gradient_sync(parameters: Mapping[str, nn.Parameter], ranks: Ranks, when: str = "") -> None:
    """Compare the gradients of all copies, bit by bit; to be called on every rank, after a step's last backward pass.

    Args:
        parameters: this rank's, by their names; parts of a sharded one are compared with the same parts.
        ranks: all of them call this.
        when: for the message, such as ``step 1``.

    Raises:
        TrainingFailure: they differ, on all ranks; the message names the first parameter and the ranks.
    """
    found = first_difference({name: parameter.grad for name, parameter in parameters.items()}, ranks)
    if found:
        raise TrainingFailure(
            f"{f'{when}: ' * bool(when)}the gradients differ after their reduction: that of {found}. A backward pass "
            "goes past what reduces them: call the wrapped model, and hold synchronisation back for no step's last "
            "micro-batch",
            quiet=not ranks.is_first,
            code="gradients-differ",
        )
