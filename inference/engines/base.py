"""The small interface that every runtime fulfils: numpy in, logits out."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Engine(Protocol):
    """A loaded classifier; threads may call it at the same time."""

    def logits(self, input_ids: NDArray[np.int64], attention_mask: NDArray[np.int64]) -> NDArray[np.float32]:
        """Run one padded batch.

        Args:
            input_ids: Token ids, (batch, seq).
            attention_mask: 1 for a token, 0 for padding, (batch, seq).

        Returns:
            One score a label before softmax, (batch, num_labels).
        """
        ...
