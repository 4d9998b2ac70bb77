"""Rows joined without padding, so that everything but attention computes real tokens only."""

from __future__ import annotations

from itertools import accumulate

import torch


class Packing:
    """Where the tokens of a padded batch of several rows are when its rows are joined.

    Joined rows are one row of all tokens, so that layers, which act on the last dimension, take
    them as they take a batch: (1, tokens, hidden). What depends on rows gets this object in the
    place of the attention mask.

    Attributes:
        shape: rows, and the length to which they are padded.
        lengths: tokens of each row, (rows,).
        starts: at which token each row begins, and the last one ends, (rows + 1,).
    """

    def __init__(self, attention_mask: torch.Tensor) -> None:
        """``attention_mask``: (rows, seq), 1 for a token; on the CPU, since lengths are read."""
        self.shape = tuple(attention_mask.shape)
        # Of each token, its index in the padded batch.
        self._index = attention_mask.flatten().nonzero().squeeze(1)
        self.lengths: list[int] = attention_mask.sum(dim=1).tolist()
        self.starts = [0, *accumulate(self.lengths)]

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """(rows, seq, ...) -> (1, tokens, ...)."""
        return states.flatten(0, 1)[self._index][None]

    def first_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """(1, tokens, hidden) -> (rows, 1, hidden)."""
        return states[0, self.starts[:-1]][:, None]

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
