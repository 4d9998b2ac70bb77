"""Long texts as overlapping windows: how they are cut, and how what a model says of each becomes
one answer.

A text that is longer than the model reads at once becomes several windows, each a whole input with
its own special tokens. Its answer is a weighted mean over them: learned attention gives each window
i the weight ``a_i = softmax_i(v . h_i)``, with ``h_i`` the vector that enters the model's last
layer. That layer is affine and the weights add up to 1, so the scores of the mean vector are the
mean of the scores:

    W (sum a_i h_i) + b  =  sum a_i (W h_i + b)

So ``v`` is one more row of the last layer, every engine computes it as one more output, and what is
left to do is :func:`pool`. With one window its weight is 1, and the answer is that of a model
without windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The key of config.json of a model that reads windows: the fields of `Windows`.
WINDOWS_KEY = "long_texts"
# The row v in the weights, (1, hidden). The last layer itself keeps one row per label, as every
# other program expects.
ATTENTION_KEY = "window_attention.weight"
# What is beyond is cut: memory and time of a text have to be bounded.
MOST_WINDOWS = 16


@dataclass(frozen=True, slots=True)
class Windows:
    """How a model's long texts are cut, all in tokens.

    All windows of a text but the last have ``length`` ids, so a row of joined windows says where
    each begins.

    Attributes:
        length: ids of a window, special tokens included.
        overlap: how many tokens a window repeats of the one before.
        most: windows per text; what is beyond is cut.
        head: the name of the last layer, which gets the row of the attention.
    """

    length: int
    overlap: int
    most: int
    head: str

    @classmethod
    def of_length(cls, length: int, head: str = "") -> Windows:
        return cls(length, length // 4, MOST_WINDOWS, head)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Windows | None:
        """Read a config.json; None if the model cuts long texts.

        Raises:
            ValueError: what it says about windows makes no sense.
        """
        found = config.get(WINDOWS_KEY)
        if found is None:
            return None
        try:
            windows = cls(**found)
            sizes = (windows.length, windows.overlap, windows.most)
            is_valid = all(type(size) is int for size in sizes) and isinstance(windows.head, str)
        except TypeError:
            is_valid = False
        if not is_valid or windows.most < 1 or not 0 <= windows.overlap < windows.length // 2:
            raise ValueError(
                f"{WINDOWS_KEY} {found!r}: must have length, overlap, most and head, as training "
                "wrote them"
            )
        return windows

    @property
    def most_ids(self) -> int:
        """The most token ids of a text, those in two windows counted twice."""
        return self.length * self.most

    def as_settings(self) -> dict[str, Any]:
        return {WINDOWS_KEY: asdict(self)}


def count_windows(num_ids: NDArray[np.integer], length: int) -> NDArray[np.integer]:
    """The windows of each row of joined windows, from its number of ids; or of one number."""
    return -(-num_ids // length)


def window_lengths(num_ids: NDArray[np.integer], length: int) -> NDArray[np.int64]:
    """The ids of each window of all rows, one row after the other: (windows,)."""
    import numpy as np  # not at the top: whoever only reads a configuration need not wait for it

    counts = count_windows(num_ids, length)
    lengths = np.full(counts.sum(), length, dtype=np.int64)
    # All are full but the last of each row, at the end of its run of windows.
    lengths[np.cumsum(counts) - 1] = num_ids - (counts - 1) * length
    return lengths


def pool(
    outputs: NDArray[np.float32], counts: NDArray[np.integer]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """One row of scores per text from the outputs for its windows.

    Args:
        outputs: (windows, labels + 1), the attention's output last; the windows of a text are
            consecutive.
        counts: the windows of each text, (texts,).

    Returns:
        Scores, (texts, labels), and the weight of each window, (windows,).
    """
    import numpy as np

    scores, attention = outputs[:, :-1], outputs[:, -1]
    # Where each text's windows begin, which is how reduceat knows the texts apart: (texts,).
    starts = np.cumsum(counts) - counts
    # Relative to the largest of a text, so that nothing overflows and a single window weighs
    # exactly 1.
    shares = np.exp(attention - np.repeat(np.maximum.reduceat(attention, starts), counts))
    shares = shares / np.repeat(np.add.reduceat(shares, starts), counts)
    return np.add.reduceat(scores * shares[:, None], starts, axis=0), shares
