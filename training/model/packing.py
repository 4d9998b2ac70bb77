"""Rows joined without padding, so that everything but attention computes real tokens only."""

from __future__ import annotations

from itertools import accumulate

import torch

CPU = torch.device("cpu")


class Packing:
    """Where the tokens of a padded batch of several rows are when its rows are joined.

    Joined rows are one row of all tokens, so that layers, which act on the last dimension, take
    them as they take a batch: (1, tokens, hidden). What depends on rows gets this object in the
    place of the attention mask.

    Attributes:
        shape: rows, and the length to which they are padded.
        lengths: tokens of each row, (rows,).
        starts: at which token each row begins, and the last one ends, (rows + 1,).
        offsets: the same as a tensor, int32, on the device, as FlashAttention's kernels take it.
    """

    def __init__(self, attention_mask: torch.Tensor, device: torch.device = CPU) -> None:
        """``attention_mask``: (rows, seq), 1 for a token. On the CPU, since lengths are read: to ask
        a GPU for them, the host would wait until it has computed all that is queued.
        ``device``: that of the states.
        """
        attention_mask = attention_mask.cpu()
        self.shape = tuple(attention_mask.shape)
        # Of each token, its index in the padded batch.
        self._index = _moved(attention_mask.flatten().nonzero().squeeze(1), device)
        self.lengths: list[int] = attention_mask.sum(dim=1).tolist()
        self.starts = [0, *accumulate(self.lengths)]
        self._starts = _moved(torch.tensor(self.starts), device)
        self.offsets = self._starts.int()

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """(rows, seq, ...) -> (1, tokens, ...)."""
        return states.flatten(0, 1)[self._index][None]

    def first_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """(1, tokens, hidden) -> (rows, 1, hidden)."""
        return states[0, self._starts[:-1]][:, None]

    def groups(self, tokens_at_once: int) -> list[slice]:
        """Consecutive rows of equal length, together no more tokens than that, unless it is one row."""
        lengths, groups, first = self.lengths, [], 0
        for row in range(1, len(lengths) + 1):
            size = (row - first + 1) * lengths[first]
            if row == len(lengths) or lengths[row] != lengths[first] or size > tokens_at_once:
                groups.append(slice(first, row))
                first = row
        return groups

    def cut(self, states: torch.Tensor, group: slice) -> torch.Tensor:
        """The rows of a group, of equal length: (1, heads, tokens, size) -> (rows, heads, seq, size),
        a view.
        """
        part = states[0, :, self.starts[group.start] : self.starts[group.stop]]
        return part.unflatten(1, (group.stop - group.start, -1)).transpose(0, 1)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Pinned, so that the host does not wait for the copy.
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)
