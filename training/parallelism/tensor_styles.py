"""Styles for ``parallelize_module`` that torch lacks: how a module's parameters are placed, and
what goes in and out.

Between modules there are always plain tensors, this rank's part of the whole; ``layout`` says which
part that is.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle


class WholeParameters(ParallelStyle):
    """Replicated parameters, applied to activations that are placed as ``layout``.

    If the activations are split along the sequence, a rank's gradient is one term of a sum. It
    stays ``Partial`` until ``gradients.reduce_partial_gradients`` or FSDP adds the terms up, once
    per step.
    """

    def __init__(self, layout: Placement) -> None:
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._to_dtensor, self._to_local)

    def _to_dtensor(
        self, module: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh
    ) -> DTensor:
        return DTensor.from_local(inputs[0], mesh, [self.layout], run_check=False)

    def _to_local(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        return output.to_local()


class ShareInput(ParallelStyle):
    """Gather a module's hidden states once for all column-parallel layers that read them.

    In the backward pass, the gradients from these layers are added up locally first, so that one
    collective is enough.
    """

    def __init__(self, layout: Placement) -> None:
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def share(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple, dict[str, Any]]:
            local, *rest = args or (kwargs["hidden_states"],)
            # A DTensor from here on: its backward pass reduces the gradient once, after local
            # addition.
            hidden = DTensor.from_local(local, device_mesh, [self.layout], run_check=False)
            hidden = hidden.redistribute(placements=[Replicate()])
            return ((hidden, *rest), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})

        module.register_forward_pre_hook(share, with_kwargs=True)
        return module


class VocabularyParallel(ParallelStyle):
    """An embedding split by vocabulary: each rank looks up the tokens it holds, and the sum over
    ranks is the result.

    Torch's ``RowwiseParallel`` computes the same, but allocates the gradient of the whole
    vocabulary on every rank.

    Source: Shoeybi et al., arXiv 1909.08053, section 3 (there the output embedding).
    """

    def __init__(self, layout: Placement) -> None:
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def embed(module: nn.Embedding, input_ids: torch.Tensor) -> torch.Tensor:
            # Each rank's rows are zero except for its own tokens, so their sum (Partial) is the
            # embedding.
            found = DTensor.from_local(
                _look_up(module, input_ids), device_mesh, [Partial()], run_check=False
            )
            return found.redistribute(placements=[self.layout]).to_local()

        module.weight = nn.Parameter(distribute_tensor(module.weight, device_mesh, [Shard(0)]))
        module.forward = MethodType(embed, module)
        return module


def _look_up(embedding: nn.Embedding, input_ids: torch.Tensor) -> torch.Tensor:
    """(batch, seq) -> (batch, seq, hidden), zero for tokens that other ranks hold."""
    weight: DTensor = embedding.weight
    ranks, rank = weight.device_mesh.size(), weight.device_mesh.get_local_rank()
    # DTensor makes all parts but the last of equal size
    first = rank * -(-embedding.num_embeddings // ranks)
    local_rows = weight.to_local()
    # Look up row 0 for tokens of other ranks, to keep indices valid, and zero the result.
    ids = input_ids - first
    elsewhere = (ids < 0) | (ids >= len(local_rows))
    padding = embedding.padding_idx
    padding = (
        padding - first
        if padding is not None and first <= padding < first + len(local_rows)
        else None
    )
    return F.embedding(ids.masked_fill(elsewhere, 0), local_rows, padding).masked_fill(
        elsewhere[..., None], 0
    )
