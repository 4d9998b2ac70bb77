"""Which texts the next forward pass takes: a fair queue over calls, without threads or a clock."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference.engines.base import TOKENS_PER_THREAD

# A call with many texts counts as up to this many calls: it makes progress while single texts keep
# coming, and the part of it that goes ahead of a single text is still only a part of one forward
# pass.
LARGEST_WEIGHT = 4
# A call with many texts may use this share of the longest wait. The rest is for single texts that
# come later and are answered before its last texts, which must still be in time.
BULK_SHARE = 0.75
# The share of padding in a pass; a text that would add more waits for others of its length.
LARGEST_PADDING = 0.25


class Flow:
    """One call's position in the queue: each text follows the one before by that one's tokens."""

    __slots__ = ("next_tag", "weight")

    def __init__(self, num_texts: int) -> None:
        self.next_tag = 0.0
        self.weight = min(num_texts, LARGEST_WEIGHT)


class QueuedText:
    """A text in the queue.

    Attributes:
        ids: its token ids, int32, (tokens,).
        num_tokens: how many there are.
        deadline: monotonic time after which no forward pass takes it.
        promised: monotonic time by which it should be answered; texts are added in this order.
        payload: data of the caller.
        is_waiting: whether it is in the queue.
        is_expired: whether it left the queue because of its deadline.
    """

    __slots__ = (
        "deadline",
        "finish",
        "ids",
        "is_expired",
        "is_waiting",
        "num_tokens",
        "order",
        "payload",
        "promised",
        "tag",
    )

    def __init__(
        self,
        ids: NDArray[np.int32],
        deadline: float,
        payload: Any = None,
        promised: float = math.inf,
    ) -> None:
        self.ids = ids
        self.num_tokens = len(ids)
        self.deadline = deadline
        self.promised = promised
        self.payload = payload
        self.is_waiting = False
        self.is_expired = False
        self.tag = self.finish = 0.0
        self.order = 0


class FairQueue:
    """Texts in the order of their start tags (start-time fair queueing, measured in tokens).

    A call's first text starts at the queue's virtual time, each further one when the previous one
    ends. Virtual time advances to the end of the oldest text of every pass. So a single text goes
    ahead of what is left of a large call, however large that is; and because later texts start
    later, every waiting text is reached.

    Later texts may thus delay the last ones of a large call. If one of those would miss its
    promised time, the oldest texts are taken first instead. That order keeps all promises, provided
    that no more was accepted than can be processed in the promised time (least laxity first, with
    two orders to choose from).

    Source:
        Goyal, Vin, Cheng, *Start-time Fair Queuing* (1996), with the virtual time of self-clocked
        fair queueing (Golestani, 1994): new calls keep coming here, and must not all start at the
        time of the one in service.
    """

    def __init__(self, max_batch_tokens: int, *, pads: bool, length_window: int) -> None:
        """Args:
        max_batch_tokens: tokens that a pass may cost; if it pads, that is its longest text times
            its number of texts.
        pads: whether passes pad.
        length_window: among how many of the oldest texts a padded pass looks for similar lengths.
        """
        self.max_batch_tokens = max_batch_tokens
        self.num_tokens = 0
        self._pads = pads
        self._length_window = length_window
        # Two orders of the same texts: by start tag (and then by when they came), sorted; and by
        # arrival, a dict as an ordered set, out of which any text can be taken at once.
        # A sorted list, not a heap: texts leave from anywhere when they are cancelled, expire, or
        # fit a pass by their length. Insertion only moves pointers.
        self._waiting: list[tuple[float, int, QueuedText]] = []
        self._by_arrival: dict[QueuedText, None] = {}
        # No waiting text has an earlier deadline. It may be that of one that has left by now.
        self._earliest_deadline = math.inf
        self._virtual_time = 0.0
        self._last_order = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, flow: Flow, text: QueuedText) -> None:
        if text.num_tokens > self.max_batch_tokens:
            raise ValueError(
                f"text of {text.num_tokens} tokens > max_batch_tokens {self.max_batch_tokens}"
            )
        # A call that comes late starts now, not at 0: it gets no credit for the time in which it
        # asked for nothing. A call with several texts advances by each, divided by its weight.
        text.tag = max(flow.next_tag, self._virtual_time)
        text.finish = flow.next_tag = text.tag + text.num_tokens / flow.weight
        self._insert(text)
        text.is_waiting = True
        self._by_arrival[text] = None
        self._earliest_deadline = min(self._earliest_deadline, text.deadline)
        self.num_tokens += text.num_tokens

    def prioritize(self, flow: Flow, text: QueuedText) -> None:
        """Let a waiting text that a second call wants too start as early as that call would."""
        tag = max(flow.next_tag, self._virtual_time)
        if tag < text.tag:
            self._take_out(text)
            text.finish -= text.tag - tag
            text.tag = tag
            self._insert(text)

    def remove(self, text: QueuedText) -> bool:
        """Remove a text; False if it is no longer waiting."""
        if not text.is_waiting:
            return False
        self._take_out(text)
        text.is_waiting = False
        del self._by_arrival[text]
        self.num_tokens -= text.num_tokens
        return True

    def expire(self, now: float) -> list[QueuedText]:
        """Remove all texts whose deadline has passed at the monotonic time ``now``."""
        # A look at thousands of texts before every pass of ten would cost more than all else here.
        if now < self._earliest_deadline:
            return []
        expired = [text for _, _, text in self._waiting if text.deadline <= now]
        for text in expired:
            self.remove(text)
            text.is_expired = True
        self._earliest_deadline = min(
            (text.deadline for text in self._by_arrival), default=math.inf
        )
        return expired

    def take(
        self,
        num_parts: int = 1,
        now: float = 0.0,
        tokens_per_second: float = math.inf,
        room: int | None = None,
    ) -> list[QueuedText]:
        """Take the texts of the next forward pass; none only if none is waiting.

        Args:
            num_parts: passes that the waiting texts will be spread over; this is the first of them.
            room: of a pass that has texts of another queue already, the tokens that are left; texts
                that do not fit stay, all of them if need be.
        """
        if not self._waiting:
            return []
        # What one pass should take so that all of them end at about the same time.
        share = self.num_tokens / num_parts
        pass_end = now + min(share, self.max_batch_tokens) / tokens_per_second
        # Fairness may not break a promise: when a text was accepted, its time was computed from all
        # that waited before it. If that time is at risk, the oldest go first until it is not.
        is_late = self._would_be_late(pass_end, tokens_per_second)
        in_order = (text for _, _, text in self._waiting)
        candidates: Iterable[QueuedText] = self._by_arrival if is_late else in_order
        choose = self._near_lengths if self._pads else self._first_of
        most = self.max_batch_tokens if room is None else min(room, self.max_batch_tokens)
        taken = choose(candidates, share, most)
        if taken and not is_late:
            self._virtual_time = max(self._virtual_time, taken[0].finish)
        for text in taken:
            self.remove(text)
        return taken

    def _would_be_late(self, start: float, tokens_per_second: float) -> bool:
        """Whether a promise would be missed even if the oldest texts came first from now on."""
        # Promises are in the order of arrival. If all that waits is done by the first of them, none
        # can be missed: that is the usual case, and it costs no loop.
        oldest = next(iter(self._by_arrival))
        end = start + self.num_tokens / tokens_per_second
        if end <= oldest.promised:
            return False
        # While more comes than can be answered, the newest text has hardly more time than all that
        # waits before it takes.
        newest = next(reversed(self._by_arrival))
        if end > newest.promised:
            return True
        num_tokens = 0
        for text in self._by_arrival:
            num_tokens += text.num_tokens
            if start + num_tokens / tokens_per_second > text.promised:
                return True
        return False

    def _first_of(
        self, candidates: Iterable[QueuedText], share: float, most_tokens: int
    ) -> list[QueuedText]:
        taken: list[QueuedText] = []
        total = 0
        for text in candidates:
            total += text.num_tokens
            if total > most_tokens or (taken and _lies_beyond(share, total, text)):
                break
            taken.append(text)
        return taken

    def _near_lengths(
        self, candidates: Iterable[QueuedText], share: float, most_tokens: int
    ) -> list[QueuedText]:
        # The first of the order is always taken, so no text waits for others of its length for
        # ever: sooner or later each is the first.
        seed, *near = islice(candidates, self._length_window)
        if seed.num_tokens > most_tokens:
            return []
        near.sort(key=lambda text: abs(text.num_tokens - seed.num_tokens))
        taken = [seed]
        total = longest = seed.num_tokens
        for text in near:
            total += text.num_tokens
            longest = max(longest, text.num_tokens)
            # With padding, every text of the pass costs as much as its longest.
            cost = longest * (len(taken) + 1)
            padding = (cost - total) / cost
            if cost > most_tokens or padding > LARGEST_PADDING:
                break
            if _lies_beyond(share, total, text):
                break
            taken.append(text)
        return taken

    def _insert(self, text: QueuedText) -> None:
        # The order makes every entry different, so that texts themselves are never compared.
        self._last_order += 1
        text.order = self._last_order
        insort(self._waiting, (text.tag, text.order, text))

    def _take_out(self, text: QueuedText) -> None:
        del self._waiting[bisect_left(self._waiting, (text.tag, text.order))]


def _lies_beyond(share: float, total: int, last: QueuedText) -> bool:
    # A text across the border of a share belongs to the side that has more of it.
    return total - last.num_tokens / 2 > share


def spread(num_texts: int, free_slots: int, free_passes: int, num_passes: int) -> tuple[int, int]:
    """Into how many passes the waiting texts are divided, and the slots of the first.

    A single text takes all free slots; more are shared with the slots that are busy now, which are
    free again before one large pass would end. All numbers are at least 1.

    Source:
        Polychronopoulos, Kuck, *Guided Self-Scheduling* (1987): each takes its share of what is
        left.
    """
    return min(num_texts, num_passes), -(-free_slots // min(num_texts, free_passes))


def useful_slots(num_tokens: int) -> int:
    """How many threads a pass of this many tokens can use."""
    return max(2, -(-num_tokens // TOKENS_PER_THREAD))


def overrun_s(
    waiting_tokens: float,
    call_tokens: float,
    num_texts: int,
    tokens_per_second: float,
    limit_s: float,
) -> float:
    """By how many seconds a call's last answer would come too late; 0 or less if the call may be
    accepted.

    Everything accepted counts, not only what is ahead of the call in the fair order: texts that
    overtake others delay them, and those must be in time too.
    """
    # There is nothing to wait for; and if a slow pass has made the measured speed too low for any
    # text, only another pass can show that it was wrong.
    if num_texts == 1 and not waiting_tokens:
        return 0.0
    share = BULK_SHARE if num_texts > 1 else 1
    return (waiting_tokens + call_tokens) / tokens_per_second - limit_s * share
