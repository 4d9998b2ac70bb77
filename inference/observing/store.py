"""Where a server keeps what it has seen and what people have corrected: SQLite, or PostgreSQL if
several servers share it.

Everything is one of three kinds. Counts are added up (`n = n + new`), so that any number of
processes may write them in any order. Feedback is only ever appended. Texts are kept only on
request, and for a limited time.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from common.credentials import without_password
from common.errors import UserError, first_line

VERSION = 1
# Seconds that a write waits for another process to finish its own.
_BUSY_S = 5.0
_MINUTES_KEPT = 8 * 24 * 60  # as minutes; then as hours
_HOURS_KEPT = 400 * 24 * 60
# Rows that are deleted at once while there is too much.
_DELETED_AT_ONCE = 5_000


class StoreError(UserError):
    """The store cannot be read or written; nothing of what was to be written is."""

    code = "observations-unusable"


class Counted(NamedTuple):
    """What is counted: ``kind`` is one of texts, distinct, cell, label, length, familiarity,
    unfamiliar, abstained, caller; ``key`` says which one, such as the label.
    """

    minute: int  # since 1970, UTC
    model: str
    revision: str
    kind: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class KeptText:
    """A text that was classified, kept for review.

    ``id``: request id and position in the request. ``uniform``: 1 if it was drawn with the same
    probability as every other text, whatever the answer.
    """

    id: str
    at: float
    model: str
    revision: str
    caller: str
    text: str
    label: str
    confidence: float
    familiarity: float | None
    uniform: int = 0


@dataclass(frozen=True, slots=True)
class ShadowAnswer:
    """What a candidate in shadow answered to a text; ``id``: of the kept text."""

    id: str
    text: str
    revision: str
    label: str
    confidence: float


@dataclass(frozen=True, slots=True)
class Feedback:
    """What somebody says about a text.

    ``id``: the same for the same statement, which is therefore recorded once. ``answered``: what
    the model had answered, empty if that is not known. ``kind``: ``correction`` from a user, or
    ``review`` from the review queue. ``why``: for what a review was asked: uniform, uncertain,
    unfamiliar, disagreeing or shadow.
    """

    id: str
    at: float
    model: str
    revision: str
    request: str
    text: str
    answered: str
    label: str
    caller: str
    author: str
    kind: str
    why: str


_TABLES = {
    "about": "version INTEGER NOT NULL",
    # In hours, once they are old: `minute` is then a multiple of 60.
    "counts": "minute BIGINT, model TEXT, revision TEXT, kind TEXT, key TEXT, n BIGINT NOT NULL, "
    "total DOUBLE PRECISION NOT NULL, PRIMARY KEY (minute, model, revision, kind, key)",
    "alarms": "model TEXT, revision TEXT, state TEXT NOT NULL, PRIMARY KEY (model, revision)",
    "texts": "id TEXT PRIMARY KEY, at DOUBLE PRECISION NOT NULL, model TEXT NOT NULL, "
    "revision TEXT NOT NULL, caller TEXT NOT NULL, text TEXT NOT NULL, label TEXT NOT NULL, "
    "confidence DOUBLE PRECISION NOT NULL, familiarity DOUBLE PRECISION, uniform INTEGER NOT NULL",
    # The database deletes an answer together with its text.
    "shadows": "id TEXT PRIMARY KEY REFERENCES texts (id) ON DELETE CASCADE, "
    "revision TEXT NOT NULL, label TEXT NOT NULL, confidence DOUBLE PRECISION NOT NULL",
    "feedback": "id TEXT PRIMARY KEY, at DOUBLE PRECISION NOT NULL, model TEXT NOT NULL, "
    "revision TEXT NOT NULL, request TEXT NOT NULL, text TEXT NOT NULL, answered TEXT NOT NULL, "
    "label TEXT NOT NULL, caller TEXT NOT NULL, author TEXT NOT NULL, kind TEXT NOT NULL, "
    "why TEXT NOT NULL",
}
_INDEXES = {
    "texts_at": "texts (model, at)",
    "texts_caller": "texts (caller)",
    "feedback_at": "feedback (model, at)",
}


class Store:
    """One database. Any thread may use it, and any number of processes."""

    def __init__(self, address: str) -> None:
        """Open it, and create its tables if they are not there.

        Args:
            address: the path of an SQLite file, or ``postgresql://USER:PASSWORD@HOST/DATABASE``.

        Raises:
            StoreError: it cannot be opened, or is of a later version.
        """
        self.address = address
        self._database = _Postgres(address) if is_postgres(address) else _Sqlite(Path(address))
        with self._transaction() as run:
            self._database.lock_schema(run)
            for name, columns in _TABLES.items():
                run(f"CREATE TABLE IF NOT EXISTS {name} ({columns})")
            for name, on in _INDEXES.items():
                run(f"CREATE INDEX IF NOT EXISTS {name} ON {on}")
            found = run("SELECT version FROM about").fetchone()
            if found is None:
                run("INSERT INTO about VALUES (?)", (VERSION,))
        if found is not None and found[0] != VERSION:
            raise StoreError(
                f"{self.name}: holds observations of version {found[0]}, and this server reads "
                f"version {VERSION}; name another file or database"
            )

    @property
    def name(self) -> str:
        """Of the file, or of the database without its password."""
        return self._database.name

    @contextlib.contextmanager
    def _transaction(self, *, writes: bool = True) -> Iterator[_Run]:
        """All of it or nothing: yields what runs a statement, with ``?`` for its values."""
        try:
            with self._database.transaction(writes) as run:
                yield run
        except self._database.errors as error:
            raise StoreError(f"{self.name}: {self._database.reason(error)}") from error

    # ------------------------------------------------------------ counts

    def add(
        self,
        counts: Mapping[Counted, tuple[int, float]],
        texts: Iterable[KeptText] = (),
        advance: Mapping[tuple[str, str], Callable[[str | None], str]] | None = None,
        undrawn: Iterable[str] = (),
        shadows: Iterable[ShadowAnswer] = (),
    ) -> None:
        """Add to the counts, keep texts, and bring alarms up to date, all in one transaction.

        Args:
            counts: by what is counted, how many, and the sum of what belongs to it (such as the
                confidences of a cell).
            advance: by model and revision, from the state of its alarm, None at first, to the new
                one. No other process changes the state in between.
            undrawn: the texts, by id, that do not count as drawn uniformly any more.
            shadows: answers of candidates; those to texts that are not kept are left out.
        """
        with self._transaction() as run:
            # In one order everywhere, so that two processes never wait for each other's rows.
            for key, (number, total) in sorted(counts.items()):
                run(
                    "INSERT INTO counts VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (minute, model, "
                    "revision, kind, key) DO UPDATE SET n = counts.n + excluded.n, "
                    "total = counts.total + excluded.total",
                    (*key, number, total),
                )
            for text in texts:
                run(f"INSERT INTO texts VALUES ({_marks(KeptText)}) ON CONFLICT DO NOTHING", text)
            for id in undrawn:
                run("UPDATE texts SET uniform = 0 WHERE id = ?", (id,))
            for one in shadows:
                # Request ids are the clients' own, so another text may be kept under this id.
                run(
                    "INSERT INTO shadows SELECT id, ?, ?, ? FROM texts WHERE id = ? AND text = ? "
                    "ON CONFLICT DO NOTHING",
                    (one.revision, one.label, one.confidence, one.id, one.text),
                )
            for key, change in sorted((advance or {}).items()):
                run("INSERT INTO alarms VALUES (?, ?, '') ON CONFLICT DO NOTHING", key)
                chosen = (
                    f"SELECT state FROM alarms WHERE model = ? AND revision = ?{run.for_update}"
                )
                state = run(chosen, key).fetchone()[0]
                changed = change(state or None)
                run("UPDATE alarms SET state = ? WHERE model = ? AND revision = ?", (changed, *key))

    def counts(
        self, model: str, revision: str, since: int, until: int, kinds: Sequence[str] = ()
    ) -> dict[tuple[str, str], tuple[int, float]]:
        """By kind and key, what was counted from minute ``since`` on and before ``until``."""
        chosen = f" AND kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
        with self._transaction(writes=False) as run:
            rows = run(
                "SELECT kind, key, SUM(n), SUM(total) FROM counts WHERE model = ? AND revision = ? "
                f"AND minute >= ? AND minute < ?{chosen} GROUP BY kind, key",
                (model, revision, since, until, *kinds),
            ).fetchall()
        return {(kind, key): (int(number), float(total)) for kind, key, number, total in rows}

    def alarm(self, model: str, revision: str) -> str | None:
        """The state that `add` left."""
        with self._transaction(writes=False) as run:
            query = "SELECT state FROM alarms WHERE model = ? AND revision = ?"
            found = run(query, (model, revision)).fetchone()
        return found[0] or None if found else None

    # ------------------------------------------------------------ texts and feedback

    def texts(self, model: str, since: float = 0.0) -> list[KeptText]:
        """The texts that are kept, the newest first."""
        with self._transaction(writes=False) as run:
            query = (
                f"SELECT {_names(KeptText)} FROM texts WHERE model = ? AND at >= ? ORDER BY at DESC"
            )
            return [KeptText(*row) for row in run(query, (model, since)).fetchall()]

    def text(self, id: str) -> KeptText | None:
        with self._transaction(writes=False) as run:
            query = f"SELECT {_names(KeptText)} FROM texts WHERE id = ?"
            found = run(query, (id,)).fetchone()
        return KeptText(*found) if found else None

    def shadows(self, model: str) -> list[ShadowAnswer]:
        """What candidates answered to the texts of a model that are kept, the newest first."""
        with self._transaction(writes=False) as run:
            query = (
                "SELECT texts.id, texts.text, shadows.revision, shadows.label, shadows.confidence "
                "FROM shadows JOIN texts ON texts.id = shadows.id WHERE texts.model = ? "
                "ORDER BY texts.at DESC"
            )
            return [ShadowAnswer(*row) for row in run(query, (model,)).fetchall()]

    def append(self, feedback: Sequence[Feedback]) -> list[bool]:
        """Record statements, all of them or none; returns which ones are new.

        When it returns, they are on the disk.
        """
        with self._transaction() as run:
            insert = f"INSERT INTO feedback VALUES ({_marks(Feedback)}) ON CONFLICT DO NOTHING"
            return [run(insert, one).rowcount == 1 for one in feedback]

    def models(self) -> list[str]:
        """The names of all models of which there are texts or statements."""
        with self._transaction(writes=False) as run:
            query = "SELECT model FROM texts UNION SELECT model FROM feedback ORDER BY model"
            return [name for (name,) in run(query).fetchall()]

    def feedback(self, model: str, since: float = 0.0) -> list[Feedback]:
        """What was said, the oldest first."""
        with self._transaction(writes=False) as run:
            query = (
                f"SELECT {_names(Feedback)} FROM feedback WHERE model = ? AND at >= ? "
                "ORDER BY at, id"
            )
            return [Feedback(*row) for row in run(query, (model, since)).fetchall()]

    def forget(self, *, caller: str | None = None, author: str | None = None) -> int:
        """Delete the texts and statements of one caller or one author; returns how many there were.

        Counts stay: they name nobody, except that the counts by caller go too.
        """
        with self._transaction() as run:
            deleted = 0
            if caller is not None:
                deleted += run("DELETE FROM texts WHERE caller = ?", (caller,)).rowcount
                deleted += run("DELETE FROM feedback WHERE caller = ?", (caller,)).rowcount
                run("DELETE FROM counts WHERE kind = 'caller' AND key = ?", (caller,))
            if author is not None:
                deleted += run("DELETE FROM feedback WHERE author = ?", (author,)).rowcount
        return deleted

    # ------------------------------------------------------------ bounds

    def tidy(self, keep_texts_s: float, max_bytes: int, now: float | None = None) -> bool:
        """Delete what is too old, make hours of old minutes, and keep within so many bytes: then
        the oldest texts go first, and after them the oldest counts.

        Returns:
            Whether there is room; not if feedback, which is never deleted here, fills all of it.
        """
        now = time.time() if now is None else now
        minute = int(now // 60)
        with self._transaction() as run:
            run("DELETE FROM texts WHERE at < ?", (now - keep_texts_s,))
            run("DELETE FROM counts WHERE minute < ?", (minute - _HOURS_KEPT,))
            run(
                "INSERT INTO counts SELECT minute / 60 * 60, model, revision, kind, key, "
                "SUM(n), SUM(total) FROM counts WHERE minute < ? AND minute / 60 * 60 <> minute "
                "GROUP BY minute / 60 * 60, model, revision, kind, key "
                "ON CONFLICT (minute, model, revision, kind, key) DO UPDATE SET "
                "n = counts.n + excluded.n, total = counts.total + excluded.total",
                (minute - _MINUTES_KEPT,),
            )
            run(
                "DELETE FROM counts WHERE minute < ? AND minute / 60 * 60 <> minute",
                (minute - _MINUTES_KEPT,),
            )
        for table, oldest in (("texts", "at"), ("counts", "minute")):
            while self._database.used_bytes() > max_bytes:
                with self._transaction() as run:
                    query = f"SELECT {oldest} FROM {table} ORDER BY {oldest} LIMIT ?"
                    found = run(query, (_DELETED_AT_ONCE,)).fetchall()
                    if not found:
                        break
                    run(f"DELETE FROM {table} WHERE {oldest} <= ?", (found[-1][0],))
                self._database.compact()
        return self._database.used_bytes() <= max_bytes

    def close(self) -> None:
        """Close this thread's connection."""
        self._database.close()


def is_postgres(address: str) -> bool:
    return address.startswith(("postgresql://", "postgres://"))


def _names(row: type) -> str:
    return ", ".join(one.name for one in fields(row))


def _marks(row: type) -> str:
    return ", ".join("?" * len(fields(row)))


# ---------------------------------------------------------------- two kinds of database


class _Run:
    """Runs statements on one connection; values are tuples, or the dataclasses of a row."""

    def __init__(self, execute: Callable[..., Any], mark: str, for_update: str) -> None:
        self._execute, self._mark, self.for_update = execute, mark, for_update

    def __call__(self, statement: str, values: Any = ()) -> Any:
        return self._execute(
            statement.replace("?", self._mark),
            values if isinstance(values, tuple) else astuple(values),
        )


class _Sqlite:
    errors = (sqlite3.Error,)

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._of_thread = threading.local()

    def _connection(self) -> sqlite3.Connection:
        found = getattr(self._of_thread, "connection", None)
        if found is None:
            found = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
            # Readers and one writer at the same time; every commit is on the disk when it returns.
            found.execute("PRAGMA journal_mode = WAL")
            found.execute("PRAGMA synchronous = FULL")
            found.execute("PRAGMA auto_vacuum = INCREMENTAL")
            # What is deleted is also gone from the file.
            found.execute("PRAGMA secure_delete = ON")
            found.execute("PRAGMA foreign_keys = ON")
            self._of_thread.connection = found
        return found

    @contextlib.contextmanager
    def transaction(self, writes: bool) -> Iterator[_Run]:
        connection = self._connection()
        # Immediately the right to write: a transaction that begins by reading may find, when it
        # comes to write, that another one has written, and would have to begin again.
        connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        try:
            yield _Run(connection.execute, "?", "")
            connection.execute("COMMIT")
        except BaseException:
            # On a full disk SQLite has rolled back already.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def lock_schema(self, run: _Run) -> None:
        """Nothing to do: there is one writer at a time."""

    def used_bytes(self) -> int:
        run = self._connection().execute
        pages, free, size = (
            run(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def compact(self) -> None:
        self._connection().execute("PRAGMA incremental_vacuum").fetchall()

    def reason(self, error: Exception) -> str:
        problem = first_line(error)
        if "locked" in problem:
            return f"another program has locked the file for more than {_BUSY_S:g} s"
        if "unable to open" in problem and not self._path.parent.is_dir():
            return f"there is no folder {self._path.parent}; create it"
        if "readonly" in problem or "unable to open" in problem:
            return "this process may not write the file; name one that it may"
        if "disk is full" in problem:
            return "the disk is full; make room"
        if "not a database" in problem or "malformed" in problem:
            return "the file is damaged, or not an SQLite database; move it away"
        return problem

    def close(self) -> None:
        if (found := getattr(self._of_thread, "connection", None)) is not None:
            found.close()
            self._of_thread.connection = None


class _Postgres:
    def __init__(self, address: str) -> None:
        self.name = without_password(address)
        try:
            import psycopg
        except ImportError as error:
            raise StoreError(
                f'{self.name}: needs the package psycopg; pip install "distrinews[postgres]"'
            ) from error
        self.errors = (psycopg.Error,)
        self._connect = lambda: psycopg.connect(
            address, autocommit=True, connect_timeout=int(_BUSY_S)
        )
        self._of_thread = threading.local()

    def _connection(self) -> Any:
        found = getattr(self._of_thread, "connection", None)
        if found is None or found.closed:
            found = self._of_thread.connection = self._connect()
        return found

    @contextlib.contextmanager
    def transaction(self, writes: bool) -> Iterator[_Run]:
        connection = self._connection()
        with connection.transaction():
            yield _Run(connection.execute, "%s", " FOR UPDATE")

    def lock_schema(self, run: _Run) -> None:
        # Two servers that start together would both find that a table is missing.
        run("SELECT pg_advisory_xact_lock(7860)")

    def used_bytes(self) -> int:
        sizes = " + ".join(f"pg_total_relation_size('{name}')" for name in _TABLES)
        return int(self._connection().execute(f"SELECT {sizes}").fetchone()[0])

    def compact(self) -> None:
        for name in ("texts", "shadows", "counts"):
            self._connection().execute(f"VACUUM FULL {name}")

    def reason(self, error: Exception) -> str:
        return first_line(error)

    def close(self) -> None:
        if (found := getattr(self._of_thread, "connection", None)) is not None:
            found.close()
            self._of_thread.connection = None
