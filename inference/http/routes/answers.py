"""From texts to answers: what all classifying routes share."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Sequence
from typing import Any, cast

from fastapi import Request
from starlette.exceptions import HTTPException

from common.calibration import CalibrationError
from common.text import Text, texts_in
from inference.batching.classifier import Answer
from inference.batching.served_model import Served, ServedModel
from inference.engines.answering import NOTHING_MORE, Wanted
from inference.errors import RefusedTextError
from inference.http.error_responses import RETRY_AFTER_SECONDS
from inference.http.request_context import RequestContext
from inference.http.schemas import AsksMore, ExplainRequest, PredictRequest
from inference.http.server_parts import Parts, weight_of
from inference.observing.stream import InShadow
from inference.settings import Settings


async def classify(
    request: Request, parts: Parts, served: Served, texts: Sequence[Text], name: str = "texts[{}]"
) -> list[Answer]:
    """Classify texts in order, all or none; ``name`` is what the client calls them, with ``{}`` for
    their position.

    Raises:
        RefusedTextError: a text is blank, or is no pair though the model reads pairs, or the other
            way round.
        RateLimitedError: the client has sent more texts than it may.
        HTTPException: 503, the texts do not fit into the memory budget.
        QueueFullError, WorkerDownError, DeadlineExceededError, ForwardError: from the queue.
    """
    answers = cast(
        "list[Answer]",
        await classify_some(request, parts, served, texts, name, num_required=len(texts)),
    )
    show(parts, served, RequestContext.of(request.scope), texts, answers)
    return answers


def show(
    parts: Parts,
    served: Served,
    context: RequestContext,
    texts: Sequence[Text],
    answers: Sequence[Answer],
    first: int = 0,
) -> None:
    """Show answers to those who look at the stream: the observer, and a candidate in shadow, whose
    answers the observer keeps with the texts. ``first``: the position of the first in its request.
    """
    observer, about = parts.observer, (served, context.request_id, context.allowance.caller)
    if observer is not None:
        observer.saw(*about, texts, answers, first)
    if served.shadow is None:
        return
    if observer is None or not observer.keeps_texts:
        served.shadow.saw(texts, answers)
        return

    def keep(place: int, in_shadow: InShadow) -> None:
        observer.saw(*about, [texts[place]], [answers[place]], first + place, in_shadow)

    served.shadow.saw(texts, answers, keep)


async def classify_some(
    request: Request,
    parts: Parts,
    served: Served,
    texts: Sequence[Text],
    name: str,
    *,
    num_required: int,
    only_stage: int | None = None,
) -> list[Answer | None]:
    """Like `classify`, but all texts after the first ``num_required`` may be blank: they get None;
    and the texts are not among those that the server counts as its stream.

    ``only_stage``: which model of a cascade is to answer all of them, as in `Answer.stage`.
    """
    refuse_other_kind(served, texts, name)
    context = RequestContext.of(request.scope)
    context.allowance.require()
    _hold(parts, context, weight_of(texts))
    futures = served.classifier.submit(texts, parts.settings.request_timeout_s, only_stage)
    context.allowance.take(len(texts) - 1)  # the gate took the first
    answers: list[Answer | None] = []
    try:
        for future in futures:
            try:
                answers.append(await future)
            except RefusedTextError as error:
                if len(answers) < num_required:
                    place = name.format(len(answers))
                    raise RefusedTextError(error.code, f"{place} {error}") from None
                answers.append(None)
    finally:
        # If one fails or the client is gone, what still waits leaves the queue.
        cancel_unfinished(futures)
    note(context, [answer for answer in answers if answer is not None])
    return answers


def _hold(parts: Parts, context: RequestContext, num_bytes: int) -> None:
    # The body can be freed once its texts are read, so the request is charged for the larger of the
    # two.
    more = num_bytes - context.held_bytes
    if more <= 0:
        return
    if not parts.body_budget.has_room(more):
        raise HTTPException(503, parts.body_budget.BUSY, {"Retry-After": str(RETRY_AFTER_SECONDS)})
    parts.body_budget.take(more)
    context.held_bytes += more


def cancel_unfinished(futures: Sequence[Future[Answer]]) -> None:
    """Cancel what is not answered, and retrieve what failed, or asyncio would warn."""
    for future in futures:
        if not future.done():
            future.cancel()
        elif not future.cancelled():
            future.exception()


def note(context: RequestContext, answers: Sequence[Answer]) -> None:
    """Record what the log and Server-Timing say about answers."""
    context.note_answers(
        (one.num_tokens, one.tokenize_s, one.queue_s, one.forward_s) for one in answers
    )


def decide(
    parts: Parts, served: Served, answer: Answer, wanted: Wanted = NOTHING_MORE
) -> tuple[list[tuple[str, float | None]], dict[str, Any]]:
    """The labels of an answer as `Answering.given` returns them, and the fields that were asked for
    beside them; counts it.

    Where the model abstains, the most probable label is still there: its confidence is shown.
    """
    answering, values, more = served.model.answering, answer.values, {}
    given = answering.given(values)
    if wanted is not NOTHING_MORE:
        familiarity = values.familiarity if wanted.needs_familiarity else None
        more = answering.honest(values, familiarity, wanted)
    if reason := more.get("abstained"):
        served.metrics.abstained(reason, answer.truncated)
        return given, more
    if "labels" in more:
        given = [one for one in given if one[0] in more["labels"]]
    elif "label" in more:  # with costs, it need not be the most probable one
        given = [(more["label"], more["confidence"])]
    served.metrics.predicted(given, answer.truncated)
    return given, more


def wanted_by(served: Served, body: AsksMore) -> Wanted:
    """What a request asks for beside the answer, and where it asks for nothing the settings do.

    Raises:
        RefusedTextError: the model cannot promise it.
    """
    if body.coverage is None and body.max_error is None and not body.familiarity:
        return served.wanted
    try:
        asked = served.model.answering.wanted(body.coverage, body.max_error, body.familiarity)
    except CalibrationError as error:
        raise RefusedTextError("no_guarantee", str(error)) from error
    return Wanted(
        asked.rule or served.wanted.rule, asked.point or served.wanted.point, asked.familiarity
    )


def render(
    parts: Parts,
    served: Served,
    answer: Answer,
    top_k: int | None = None,
    wanted: Wanted = NOTHING_MORE,
) -> dict[str, Any]:
    """Turn an answer into the response for this kind of model, and count it."""
    answering = served.model.answering
    given, more = decide(parts, served, answer, wanted)
    fields = answering.fields(answer.values, given, top_k) | more
    fields["truncated"] = answer.truncated
    fields["num_tokens"] = answer.num_tokens
    # Of several labels the passage is that of the first; where no label applies, nothing decided.
    if given and (passage := answer.passage(answering.labels.index(given[0][0]))):
        fields["passage"] = dict(zip(("start", "end"), passage, strict=True))
    return fields


def model_named(parts: Parts, name: str | None) -> ServedModel:
    """The model of this name, or the default for None.

    Raises:
        HTTPException: 404, there is none.
    """
    if (model := parts.models.find(name)) is None:
        verb = "is" if len(parts.models.all) == 1 else "are"
        raise HTTPException(404, f"no model of this name; {parts.models.names} {verb} served")
    return model


def require_named(parts: Parts, name: str | None) -> Served:
    """What is served under this name, or by default for None.

    Raises:
        ModelUnavailableError: the model is not loaded.
        HTTPException: 404, there is no such model.
    """
    return model_named(parts, name).require()


def refuse_other_kind(served: Served, texts: Sequence[Text], name: str) -> None:
    """Refuse single texts for a model that reads pairs, and the other way round."""
    reads_pairs = served.model.reads_pairs
    wrong = next(
        (place for place, text in enumerate(texts) if isinstance(text, str) is reads_pairs), None
    )
    if wrong is not None:
        what = "has no second text (text_pair)" if reads_pairs else "has a second text (text_pair)"
        kind = "pairs of texts" if reads_pairs else "single texts"
        raise RefusedTextError(
            "wrong_kind_of_text", f"{name.format(wrong)} {what}; this model reads {kind}"
        )


def with_pairs(
    texts: Sequence[str], pairs: Sequence[str] | None, settings: Settings
) -> Sequence[Text]:
    """Each text with its second text, if there are any.

    Raises:
        RefusedTextError: there are more or fewer of them, or one is too long.
    """
    if pairs is None:
        return texts
    if len(pairs) != len(texts):
        line = (
            f"text_pairs has {len(pairs)} entries and texts {len(texts)}; send a second text for "
            "each"
        )
        raise RefusedTextError("invalid_request", line)
    refuse_many("text_pairs[{}]", pairs, settings)
    return list(zip(texts, pairs, strict=True))


def text_of(body: PredictRequest | ExplainRequest, settings: Settings) -> Text:
    """The text of a request, or its pair of texts.

    Raises:
        RefusedTextError: one is too long.
    """
    refuse_long("text", body.text, settings)
    if body.text_pair is None:
        return body.text
    refuse_long("text_pair", body.text_pair, settings)
    return body.text, body.text_pair


def refuse_long(name: str, text: str, settings: Settings) -> None:
    if len(text) > settings.max_text_chars:
        raise RefusedTextError(
            "text_too_long",
            f"{name} has {len(text)} characters > maximum {settings.max_text_chars}; shorten it",
        )


def refuse_many(name: str, texts: Sequence[Text], settings: Settings) -> None:
    """Refuse too many texts, and any that is too long; ``name`` is as in `classify`."""
    if len(texts) > settings.max_batch_texts:
        what = name.removesuffix("[{}]")
        raise RefusedTextError(
            "too_many_texts",
            f"{what} has {len(texts)} entries > maximum {settings.max_batch_texts}; send more "
            "batches",
        )
    for position, text in enumerate(texts):
        for part in texts_in(text):
            refuse_long(name.format(position), part, settings)
