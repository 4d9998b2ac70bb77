"""Record what a learner's function sends and receives, by whichever name it calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# A dispatch mode sees each operation that Python or C++ (as in DDP) starts on this thread, those of
# torch.distributed included. PyTorch 2.13 has no public name for it.
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Call:
    """One operation of torch.distributed.

    Args:
        name: as PyTorch calls it inside: send, recv, allreduce, broadcast, ...
        num_bytes: of the tensors that it is given first; those that it sends, if the name is send
            or allreduce.
        peer: the other rank of a send or a receive.
    """

    name: str
    num_bytes: int = 0
    peer: int | None = None


class RecordedCalls(TorchDispatchMode):
    """A context manager that lists the calls of this rank, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first call imports torch.compile, which takes seconds

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        # torch.distributed's operations are in this namespace, under the backend's names: both
        # dist.all_reduce and DDP's own call arrive as c10d::allreduce_.
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.rstrip("_")
            # What a call is given first: a list of tensors, or one.
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            num_bytes = sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))
            self.calls.append(Call(name, num_bytes, args[2] if name in ("send", "recv") else None))
        return func(*args, **(kwargs or {}))
