"""LiveMemory: bytes of the tensors alive while a step runs, by what they are for; on real tensors or on fake ones.

Every tensor that an operation gives is counted once, by its storage, until the storage is freed or resized. So the
same count serves any layout: what FSDP gathers and frees, what DTensor computes on this rank's part, what a checkpoint
computes again. ``torch.distributed._tools`` has trackers of this kind, for one module or for FSDP's root alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = Literal["parameters", "gradients", "optimizer", "activations", "temporary", "communication"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "activations", "temporary", "communication")
_PASSING: tuple[Kind, ...] = ("activations", "temporary")

# DTensor asks for the shape of a result by running the operation on whole fake tensors; nothing of that is memory.
_ASKS_SHAPES = "_propagate_tensor_meta_non_cached"


class LiveMemory(TorchDispatchMode):
    """Counts while it is entered. What was made before counts once :meth:`count` is told of it.

    ``now``: bytes alive, by kind; ``at_peak``: the same when their sum was largest; ``kind``: what new tensors are
    for, where nothing says another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind: Kind = "activations"
        self.now: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.at_peak = dict(self.now)
        self.peak = 0
        self._storages: dict[int, tuple[weakref.ref, Kind, int]] = {}
        self._pauses = 0

    def count(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Count a tensor's storage under ``kind``, whatever it was counted under before."""
        storage = _local(tensor).untyped_storage()
        key = storage._cdata
        self._forget(key)
        self._storages[key] = (weakref.ref(storage, partial(self._died, key)), kind, storage.nbytes())
        self.now[kind] += storage.nbytes()
        self._note_peak()

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = 0
        self._note_peak()

    def _kind_of(self, tensor: Any) -> Kind | None:
        known = self._storages.get(tensor.untyped_storage()._cdata) if isinstance(tensor, torch.Tensor) else None
        return known[1] if known else None

    def _forget(self, key: int) -> None:
        _, kind, size = self._storages.pop(key, (None, "temporary", 0))
        self.now[kind] -= size

    def _died(self, key: int, _: object) -> None:
        self._forget(key)

    def _note_peak(self) -> None:
        total = sum(self.now.values())
        if total > self.peak:
            self.peak, self.at_peak = total, dict(self.now)

    def __enter__(self) -> LiveMemory:
        self._undo = [_replace(torch.UntypedStorage, "resize_", self._resize)]
        self._undo.append(_replace(ShardingPropagator, _ASKS_SHAPES, self._pause))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for undo in self._undo:
            undo()
        super().__exit__(*error)

    def _resize(self, original: Any, storage: torch.UntypedStorage, size: int) -> None:
        original(storage, size)
        key = storage._cdata
        if key in self._storages:
            reference, kind, before = self._storages[key]
            self._storages[key] = (reference, kind, size)
            self.now[kind] += size - before
            self._note_peak()

    def _pause(self, original: Any, *args: Any) -> Any:
        with self._paused():
            return original(*args)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it gave."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first takes it apart into operations on this rank's part
        # Outside of fake tensors, waiting gives the tensor that was waited for.
        waits = func is torch.ops._c10d_functional.wait_tensor.default
        result = args[0] if waits else func(*args, **(kwargs or {}))
        if not self._pauses:
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and self._kind_of(tensor) is None:
                    self.count(tensor, self._kind_of_result(func, args))
            self._see_communication(func, args, kwargs, result)
        return result

    def _kind_of_result(self, func: Any, args: Any) -> Kind:
        # A copy of a weight in the computing dtype lives as long as what FSDP gathers does.
        copies_weight = func is torch.ops.aten._to_copy.default and self._kind_of(args[0]) == "parameters"
        return "communication" if copies_weight else self.kind

    def _see_communication(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func.namespace == "fsdp":  # packs and unpacks what is gathered and reduced
            for tensor in tree_leaves((args, kwargs, result)):
                if self._kind_of(tensor) in _PASSING:
                    self.count(tensor, "communication")
        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            self.count(args[0], "gradients")
        elif func is torch.ops.c10d.allreduce_.default:  # of FSDP's copies; all other sums are functional
            for tensor in args[0]:
                self.count(tensor, "gradients")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _replace(owner: type, name: str, wrapper: Any) -> Any:
    """Put ``wrapper(original, self, ...)`` in a method's place; returns what puts the method back."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))
    return partial(setattr, owner, name, original)
