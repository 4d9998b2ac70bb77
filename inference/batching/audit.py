"""Whether a cascade keeps its promise on the texts that really come: checked while it serves."""

from __future__ import annotations

import logging
import math
import random
import threading

from inference.engines.model_loader import Cascade

logger = logging.getLogger(__name__)

# Shares of texts that are checked: at first and whenever the texts seem to have changed, so that a
# broken promise is noticed within a few thousand texts; and from then on.
CHECKED_AT_FIRST = 0.25
CHECKED = 0.01
# So many checks at the higher share. To see 3% of other answers where 0.5% are promised takes 150.
CHECKS_AT_FIRST = 400
# The evidence at which the promise counts as broken: it gets there by chance, while the promise is
# kept, with probability 1/20 at most, however long the server runs.
ALARM = 20.0
# How much is bet on every text, see `Audit.checked`: the best bet against a share q of other
# answers is about (q - promised) / promised, so these suit 2 to 30 times what is promised.
_BETS = (1.0, 3.0, 10.0, 30.0)
# After so many checks some of the money that is left is put in, see `Audit`.
_INVESTED_EVERY = 400
# The share of texts passed on is averaged over about so many texts, and has changed if it is so
# many standard deviations away from what it was.
_RECENT_TEXTS = 500
_CHANGED_BY = 5.0


class Audit:
    """Bets against the promise, and makes the cascade stricter once it has won too much.

    A text is checked at random, before anybody knows who answers it. What the small model answers
    is then answered by the big one too. The gambler starts with 1 and bets on every checked text
    that the answers differ: E is multiplied by 1 + b (d - p), with d = 1 if they differ, p the
    promised share and b the bet. While at most p of the texts differ, no bet has a gain to expect,
    so E is a supermartingale and by Ville's inequality ever reaches 20 with probability 1/20 at
    most: it may be looked at after every text. Nobody knows the best bet, so what is put in is
    divided over several. And while the promise is kept, bets lose more and more: so that a broken
    promise is still noticed after months, only half of the money is put in at first, and parts of
    the rest from time to time, 1/6, 1/12, 1/20, which add up to no more than all. How many texts
    are checked may change at any time, as it does not depend on how the text at hand will be
    answered.

    Source:
        Waudby-Smith, Ramdas, *Estimating means of bounded random variables by betting* (2023).
    """

    def __init__(self, cascade: Cascade, seed: int | None = None) -> None:
        self.threshold = cascade.threshold
        self.num_tightened = 0
        self._stricter = list(cascade.stricter)
        self._promised = cascade.max_disagreement
        self._random = random.Random(seed)
        self._lock = threading.Lock()  # guards all that follows
        self._recent = self._usual = 0.0
        self._num_texts = 0
        self._begin()

    def _begin(self) -> None:
        self._savings, self._wealth = 1.0, [0.0] * len(_BETS)
        self._num_checked, self._checks_left = 0, CHECKS_AT_FIRST
        self._invest()

    def _invest(self) -> None:
        before = self._num_checked // _INVESTED_EVERY
        amount = 1 / ((before + 1) * (before + 2))
        self._savings -= amount
        self._wealth = [one + amount / len(_BETS) for one in self._wealth]

    @property
    def evidence(self) -> float:
        """What 1 has become by betting against the promise; 20 and more is taken as proof."""
        return self._savings + sum(self._wealth)

    @property
    def share(self) -> float:
        """Of the texts, how many are checked while the server is not busy."""
        return CHECKED_AT_FIRST if self._checks_left > 0 else CHECKED

    def draws(self, passed_on: bool, *, is_busy: bool = False) -> bool:
        """Whether to check the text at hand; one that is passed on has the big model's answer
        anyway, and counts as checked.
        """
        with self._lock:
            self._watch(passed_on)
            if self._random.random() >= (CHECKED if is_busy else self.share):
                return False
        if passed_on:
            self.checked(self.threshold, differs=False)
            return False
        return True

    def checked(self, threshold: float, *, differs: bool) -> None:
        """Take the outcome of a check; ``threshold``: that by which the small model answered."""
        with self._lock:
            if threshold != self.threshold:
                return  # made stricter meanwhile: it says nothing about that
            self._checks_left -= 1
            # No text may cost more than all that there is.
            bets = [min(bet, 0.9 / self._promised) for bet in _BETS]
            self._wealth = [
                one * (1 + bet * (differs - self._promised))
                for one, bet in zip(self._wealth, bets, strict=True)
            ]
            self._num_checked += 1
            if self.evidence < ALARM or not self._stricter:
                if self._num_checked % _INVESTED_EVERY == 0:
                    self._invest()
                return
            before, self.threshold = self.threshold, self._stricter.pop(0)
            self.num_tightened += 1
            self._begin()
        logger.warning(
            "the cascade's models disagree more often than in %.2g%% of texts, as was promised, so "
            "the small one now answers from %.1f%% on instead of %.1f%%; certify it again on texts "
            "like these (python -m inference.cascade)",
            100 * self._promised,
            100 * self.threshold,
            100 * before,
        )

    def _watch(self, passed_on: bool) -> None:
        """Check more texts again if clearly more or fewer are passed on than before."""
        self._num_texts += 1
        weight = max(1 / self._num_texts, 1 / _RECENT_TEXTS)
        self._recent += weight * (passed_on - self._recent)
        if self._checks_left > 0 or self._num_texts < _RECENT_TEXTS:
            self._usual = self._recent
            return
        # The variance of an exponential mean over n texts is that of one text, divided by 2 n.
        spread = math.sqrt(max(self._usual * (1 - self._usual), 0.01) / (2 * _RECENT_TEXTS))
        if abs(self._recent - self._usual) > _CHANGED_BY * spread:
            self._checks_left, self._usual = CHECKS_AT_FIRST, self._recent
