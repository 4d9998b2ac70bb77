"""Texts worth a label: list them, label them, and exchange labels with other tools.

The texts are those that a server keeps with OBSERVE and KEEP_TEXTS.
"""

from __future__ import annotations

import argparse
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from common.errors import OneLineParser, UserError, positive, run_command
from common.text import counted
from inference.observing.store import Feedback, KeptText, Store, is_postgres
from loop.candidates import REASONS, Item, choose
from loop.exchange import FORMATS, Labelled, decided, read, write
from loop.labelling import LabellingServer, Session, author_named, review_of


def main() -> int:
    options = _parse()
    if not is_postgres(options.store) and not Path(options.store).is_file():
        what = (
            f"--store {options.store}: there is no such file; name what OBSERVE of the server names"
        )
        raise UserError(what, code="review-store")
    store = Store(options.store)
    try:
        return options.run(store, options)
    finally:
        store.close()


def _parse() -> Namespace:
    parser = OneLineParser(prog="python -m loop.review", description=__doc__)
    parser.add_argument(
        "--store",
        default="observed.sqlite",
        help="what OBSERVE of the server names (default: observed.sqlite)",
    )
    parser.add_argument("--model", help="its name (default: the only one there is)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run)
        return added

    def queue_flags(added: argparse.ArgumentParser) -> None:
        added.add_argument("--count", type=positive, default=100, help="most texts (default: 100)")
        added.add_argument(
            "--second", metavar="NAME", help="a second model that was asked the same texts"
        )

    queue_flags(command("queue", _queue, "how many texts are worth a label, and why"))
    serve = command("serve", _serve, "label them in a browser on this machine, with the keyboard")
    queue_flags(serve)
    serve.add_argument("--by", required=True, metavar="NAME", help="who labels")
    serve.add_argument("--port", type=int, default=7870, help="0 is a free one (default: 7870)")
    out = command("export", _export, "write labels to a file: .csv, .jsonl or .json")
    out.add_argument("file", type=Path)
    out.add_argument("--format", choices=FORMATS, default="plain", help="default: plain")
    out.add_argument(
        "--queue", action="store_true", help="texts that are worth a label, to label them elsewhere"
    )
    queue_flags(out)
    into = command("import", _import, "record the labels of a file as reviews")
    into.add_argument("file", type=Path)
    into.add_argument("--by", metavar="NAME", help="who labelled rows that do not say it")
    for one in (serve, into):
        one.add_argument(
            "--labels", help="all labels, with commas; default: those that the model has answered"
        )
    forget = command("forget", _forget, "delete the texts and statements of a person or a caller")
    who = forget.add_mutually_exclusive_group(required=True)
    who.add_argument("--by", metavar="NAME", help="who labelled or corrected")
    who.add_argument("--caller", metavar="NAME", help="the key's name, or anonymous")
    return parser.parse_args()


def _model(store: Store, options: Namespace) -> str:
    names = store.models()
    if options.model in names or (options.model is None and len(names) == 1):
        return options.model or names[0]
    known = (
        f"there are {', '.join(names)}" if names else "there are no texts and no corrections yet"
    )
    what = f"--model {options.model}: is not there" if options.model else "--model: name one"
    raise UserError(f"{what}; {known} in {store.name}", code="review-store")


def _chosen(store: Store, options: Namespace) -> tuple[str, list[Item]]:
    model = _model(store, options)
    second = store.texts(options.second) if options.second else []
    said = store.feedback(model)
    items = choose(store.texts(model), said, options.count, second, store.shadows(model))
    return model, items


def _labels(given: str | None, kept: Sequence[KeptText], said: Sequence[Feedback]) -> list[str]:
    if given:
        return [name.strip() for name in given.split(",") if name.strip()]
    named = {one.label for one in (*kept, *said)} | {one.answered for one in said}
    return sorted(named - {""})


def _queue(store: Store, options: Namespace) -> int:
    _, items = _chosen(store, options)
    found = Counter(one.why for one in items)
    for reason in REASONS:
        print(f"{found[reason]:6,} {reason}")
    print(f"{len(items):6,} in all")
    return 0


def _serve(store: Store, options: Namespace) -> int:
    author = author_named(options.by)
    model, items = _chosen(store, options)
    if not items:
        what = "no text is left to review; texts are kept if the server has KEEP_TEXTS"
        raise UserError(what, code="review-store")
    labels = _labels(options.labels, store.texts(model), store.feedback(model))
    session = Session(store, model, labels, items, author)
    with LabellingServer(options.port, session) as server:
        print(f"{len(items)} texts: {server.address} (Ctrl-C saves and ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            # As it is told to end.
            print()
    print(f"labelled {session.finish()} of {len(items)} texts")
    return 0


def _export(store: Store, options: Namespace) -> int:
    if options.queue:
        _, items = _chosen(store, options)
        found = [
            Labelled(
                *(one.text, None, one.answered),
                why=one.why,
                request=one.request,
                revision=one.revision,
            )
            for one in items
        ]
    else:
        found = [Labelled.of(one) for one in decided(store.feedback(_model(store, options)))]
    write(options.file, found, options.format)
    print(f"{options.file}: {counted(len(found), 'text')}")
    return 0


def _import(store: Store, options: Namespace) -> int:
    found = read(options.file)
    model = options.model or _model(store, options)
    kept, said = store.texts(model), store.feedback(model)
    labels = _labels(options.labels, kept, said)
    ids = {one.id: one for one in kept}
    reviews = []
    for one in found:
        author = author_named(one.by or options.by or "")
        if labels and one.label not in labels:
            what = f"label {one.label!r} is not one of {', '.join(labels)}; add it with --labels"
            raise UserError(f"{options.file}: {what}", code="review-file")
        asked = ids.get(one.request)
        item = Item(
            *(one.text, one.request, one.revision, one.answered),
            *(asked.caller if asked else "", one.why),
        )
        reviews.append(review_of(model, item, one.label or "", author, time.time()))
    new = sum(store.append(reviews)) if reviews else 0
    print(f"{options.file}: {counted(len(reviews), 'label')}, {new:,} of them new")
    return 0


def _forget(store: Store, options: Namespace) -> int:
    deleted = store.forget(caller=options.caller, author=options.by)
    print(f"texts and statements deleted: {deleted:,}")
    return 0


if __name__ == "__main__":
    run_command(main)
