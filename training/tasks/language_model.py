"""Language models: a model of plain text, which predicts the next token (causal) or tokens that
were hidden (masked).

Rows have no labels. Texts follow each other, with the tokenizer's end token in between, and are cut
into blocks of ``max_length`` tokens; a block is a row for everything else, so nothing is ever
padded but the last block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from common.errors import UserError
from training.tasks.task import PlainTextTask

# The target of a token that is not predicted, as cross-entropy calls it.
IGNORED = -100
# Of all tokens this share is predicted; of these 80% are hidden by the mask token and 10% by
# another token, and 10% are left as they are (Devlin et al., "BERT", arXiv 1810.04805, section
# 3.1).
MASKED_SHARE = 0.15
HIDDEN, REPLACED = 0.8, 0.1


@dataclass(frozen=True)
class Vocabulary:
    """What a language model needs to know of its tokenizer; ids are None if it has no such token.

    ``special``: ids that are never hidden, such as the one between texts.
    """

    size: int
    special: tuple[int, ...]
    mask: int | None
    end: int | None


class LanguageModel(PlainTextTask):
    """What both kinds share. Scores are (rows, tokens, vocabulary), targets int64 (rows, tokens)."""

    rows_at_once = 8  # of the scores of more rows, an evaluation would take gigabytes
    num_scores = 3

    @classmethod
    def check_vocabulary(cls, model: str, vocabulary: Vocabulary) -> None:
        """Refuse a tokenizer that lacks a token which this task needs.

        Raises:
            UserError: it does.
        """

    def row_losses(
        self, scores: torch.Tensor, targets: torch.Tensor, label_smoothing: float
    ) -> torch.Tensor:
        """The mean cross-entropy over the tokens that are predicted."""
        # A row may have nothing to predict, as a block of one token has. Its loss is 0 then and not
        # NaN, which would get into the sum of the batch even with a weight of 0.
        losses = self._token_losses(scores, targets)
        return losses.sum(dim=1) / (targets != IGNORED).sum(dim=1).clamp(min=1)

    def summary(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Of each row's predicted tokens the sum of the losses, how many are right, and how many
        there are.
        """
        losses, right = self._answers(scores, targets)
        count = (targets != IGNORED).sum(dim=1)
        return torch.stack([losses.sum(dim=1), right.sum(dim=1).float(), count.float()], dim=1)

    def _answers(
        self, scores: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of each token and whether it is predicted right, (rows, tokens); 0 and false for
        others.
        """
        scores = scores[:, : targets.shape[1]]  # a strategy may have padded more
        right = (scores.argmax(dim=2) == targets) & (targets != IGNORED)
        return self._token_losses(scores, targets), right

    def _token_losses(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy, (rows, tokens); 0 for a token that is not predicted."""
        flat = F.cross_entropy(
            scores.flatten(0, 1).float(), targets.flatten(), reduction="none", ignore_index=IGNORED
        )
        return flat.view_as(targets)

    def metrics(
        self, scores: np.ndarray, targets: np.ndarray, chosen: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """``scores``: what :meth:`summary` returned. The perplexity is e to the mean loss of a
        predicted token.
        """
        loss, right, count = scores.sum(axis=0, dtype=np.float64)
        mean = float(loss / count)
        return {
            "rows": len(scores),
            "tokens": int(count),
            "loss": mean,
            "perplexity": math.exp(min(mean, 700.0)),  # more would be no float
            "token_accuracy": float(right / count),
            "labels": [],
        }


class CausalLanguageModel(LanguageModel):
    """Each token is predicted from those before it."""

    name = "causal_lm"
    auto_class = "AutoModelForCausalLM"

    @classmethod
    def check_vocabulary(cls, model: str, vocabulary: Vocabulary) -> None:
        if vocabulary.end is None:
            raise UserError(
                f"--model {model} and --task causal_lm: its tokenizer has no token for the end of "
                "a text (eos_token)",
                code="token-missing",
            )

    def predicted(self, lengths: np.ndarray) -> np.ndarray:
        # Nothing comes before the first token from which it could be predicted.
        return lengths - 1

    def inputs_and_targets(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor,
        rows: np.ndarray,
        seed: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The target at a place is the token after it, (rows, tokens). Nothing follows the last
        # token, and padding is no token to predict.
        following = torch.full_like(input_ids, IGNORED)
        following[:, :-1] = input_ids[:, 1:]
        if attention_mask is not None:
            following[:, :-1].masked_fill_(attention_mask[:, 1:] == 0, IGNORED)
        return input_ids, following


class MaskedLanguageModel(LanguageModel):
    """Hidden tokens are predicted from all others.

    The vocabulary is by far the widest layer, and six of seven tokens are not predicted. So
    :meth:`inputs_and_targets` marks those that are (``~id`` in place of ``id``, which is negative),
    and the model's scores are theirs alone, one token after the other: (tokens that are predicted,
    vocabulary).
    """

    name = "masked_lm"
    auto_class = "AutoModelForMaskedLM"
    vocabulary: Vocabulary

    @classmethod
    def check_vocabulary(cls, model: str, vocabulary: Vocabulary) -> None:
        if vocabulary.mask is None:
            raise UserError(
                f"--model {model} and --task masked_lm: its tokenizer has no mask token; use an "
                "encoder such as BERT, "
                "or --task causal_lm",
                code="token-missing",
            )

    def predicted(self, lengths: np.ndarray) -> np.ndarray:
        # Of the length alone, so that every rank knows the weight of every row without drawing its
        # mask.
        return np.maximum(1, np.round(MASKED_SHARE * lengths).astype(np.int64))

    def inputs_and_targets(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor,
        rows: np.ndarray,
        seed: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, targets = input_ids.numpy().copy(), np.full(input_ids.shape, IGNORED)
        lengths = [ids.shape[1]] * len(ids)
        if attention_mask is not None:
            lengths = attention_mask.sum(dim=1).tolist()
        for row, (number, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
            # The row's own numbers, so that they are the same on whichever rank it is.
            generator = np.random.default_rng([*seed, number])
            # Special tokens come last, since 1 is added to their draw: they are hidden only if
            # there is nothing else.
            is_special = np.isin(ids[row, :length], self.vocabulary.special)
            # The `count` smallest draws are chosen: that is exactly the number which `predicted`
            # has promised to all ranks, and which a draw for each token by itself would only reach
            # on average.
            order = generator.random(length) + is_special
            count = int(self.predicted(np.array(length)))
            chosen = np.argpartition(order, count - 1)[:count]
            targets[row, chosen] = ids[row, chosen]
            draw = generator.random(count)
            ids[row, chosen[draw < HIDDEN]] = self.vocabulary.mask
            replaced = chosen[(draw >= HIDDEN) & (draw < HIDDEN + REPLACED)]
            ids[row, replaced] = generator.integers(0, self.vocabulary.size, len(replaced))
            ids[row, chosen] = ~ids[row, chosen]
        return torch.from_numpy(ids), torch.from_numpy(targets)

    def _token_losses(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Scores are (tokens that are predicted, vocabulary), row after row, and the mask selects
        # targets in the same order. `masked_scatter` puts the losses back into (rows, tokens), with
        # 0 between them.
        is_predicted = targets != IGNORED
        losses = torch.zeros(targets.shape, device=scores.device)
        found = F.cross_entropy(scores.float(), targets[is_predicted], reduction="none")
        return losses.masked_scatter(is_predicted, found)

    def _answers(
        self, scores: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_predicted = targets != IGNORED
        right = torch.zeros_like(is_predicted)
        right[is_predicted] = scores.argmax(dim=1) == targets[is_predicted]
        return self._token_losses(scores, targets), right
