"""A job of scoring: its record, its parts, and the claims by which processes share them.

A correct result does not depend on claims. A part is a function of the input and the model, and is
written whole, so two processes that score the same part write the same bytes; claims only keep that
from happening often. What is on disk at any moment is therefore a job that the same command can
finish:

    OUT                        the output, once it is complete
    OUT.job.json               what the job is: inputs, model, settings; stays beside OUT and says
                               which model wrote it
    OUT.parts/JOB-0/17.part    a finished part of the first input file
    OUT.parts/JOB-0/17.claim   a process is working on it, and changes this file every few seconds
    OUT.parts/JOB-0/17.place   where in the input it begins
    OUT.parts/JOB-0/end        the number of parts, once someone has read the last one
    OUT.parts/JOB-0/done       the output is complete

JOB is a hash of the record, so that parts that another job left behind are never taken for this
one's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import secrets
import threading
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from common.errors import UserError
from common.files import nearest_folder
from common.processes import process_fields
from common.row_parts import Part, PartReader, open_parts
from common.rows import FORMATS
from common.text_files import Place
from inference.bulk.rows_out import FORMATS as OUT_FORMATS
from inference.bulk.storage import Storage, is_remote, storage_of

# A claim that has not changed for so long belongs to a process that is gone. Measured on the clock
# of whoever waits, so that machines need not agree about the time.
LEASE_SECONDS = 60.0
BEAT_SECONDS = 5.0
VERSION = 1


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of rows and where they go.

    ``name``: below the folder that was given; ``suffix``: in small letters.
    """

    path: str
    name: str
    out: str
    suffix: str
    out_suffix: str


@dataclass
class Job:
    """All files of a command, and what makes it the same job when it is started again."""

    source: str
    out: str
    files: list[InputFile]
    inputs: Storage
    outputs: Storage
    settings: dict[str, Any]
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def record_path(self) -> str:
        return f"{self.out}.job.json"

    @cached_property
    def fingerprint(self) -> str:
        """Of a job that has begun: its parts carry it in their path."""
        # Not "finished" and "rows", which the end of the job adds: a process that is late must look
        # for its parts where it wrote them.
        what = {name: self.record[name] for name in ("version", "model", "settings", "inputs")}
        return hashlib.sha256(_json(what)).hexdigest()[:12]

    @property
    def parts_folder(self) -> str:
        return f"{self.out}.parts"

    def discard(self) -> None:
        """Forget an earlier start of this job with its finished parts.

        Raises:
            UserError: there is an output, which stays, and so does the record that says what wrote
                it.
        """
        if self._out_exists():
            raise UserError(
                f"{self.out}: exists, and --restart removes no output; remove it first",
                code="score-out-exists",
            )
        self.outputs.remove(self.record_path)
        self._remove_parts()

    def _remove_parts(self) -> None:
        self.outputs.remove_folder(self.parts_folder)

    def earlier_record(self) -> dict[str, Any]:
        """What an earlier start of this job wrote; empty if there was none."""
        data = self.outputs.read(self.record_path)
        if data is None:
            if self._out_exists():
                raise UserError(
                    f"{self.out}: exists, and no job of this command wrote it; remove it or name "
                    "another OUT",
                    code="score-out-exists",
                )
            return {}
        try:
            record = json.loads(data)
            if record["version"] != VERSION:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.record_path}: not the record of a job; remove it and {self.out}",
                code="score-out-exists",
            ) from None
        if not record["finished"]:
            return record
        missing = [file.out for file in self.files if not self.outputs.exists(file.out)]
        if not missing:
            return record
        if self._out_exists():
            raise UserError(
                f"{missing[0]}: was complete and is gone, but the rest of {self.out} is still "
                "there; remove all of it to have it written again, or name another OUT",
                code="score-out-exists",
            )
        self.outputs.remove(self.record_path)  # the output was removed to have it written again
        return {}

    def _out_exists(self) -> bool:
        if self.outputs.is_folder(self.out):
            return bool(self.outputs.find(self.out))
        return self.outputs.exists(self.out)

    def begin(self, model: dict[str, Any]) -> None:
        """Write the record, or hold this job to the one that is already there.

        Raises:
            UserError: that was another model, other settings, or other rows.
        """
        earlier = self.earlier_record()
        if not earlier:
            self.record = {
                "version": VERSION,
                "finished": False,
                "model": model,
                "settings": self.settings,
                "inputs": [self._describe(file) for file in self.files],
            }
            parent = self.out.rstrip("/").rpartition("/")[0]
            if parent:
                self.outputs.make_folder(parent)
            # Of several processes that start at once, one writes the record. The others check
            # theirs against it below, as a later start does.
            if self.outputs.create(self.record_path, _json(self.record)):
                return
            earlier = self.earlier_record()  # another process was first
        if changed := self._first_change(earlier, model):
            raise UserError(
                f"{self.out}: belongs to another job ({changed}); name another OUT, or remove "
                f"{self.out} and pass --restart to begin again",
                code="score-job-changed",
            )
        self.record = earlier
        if self.finished:
            self._remove_parts()  # a process may have been killed just before that

    def _describe(self, file: InputFile) -> dict[str, Any]:
        return {
            "name": file.name,
            **self.inputs.version(file.path),
            **({"sha256": sha256} if (sha256 := self.inputs.checksum(file.path)) else {}),
        }

    def _first_change(self, earlier: dict[str, Any], model: dict[str, Any]) -> str | None:
        for old, new in ((earlier["model"], model), (earlier["settings"], self.settings)):
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    return f"{name} was {_short(old.get(name))} and is now {_short(new.get(name))}"
        names, before = [file.name for file in self.files], earlier["inputs"]
        for name in sorted(set(names) ^ {known["name"] for known in before}):
            return f"the input {name} {'is new' if name in names else 'is gone'}"
        # Last and one by one, because this may read and hash every byte of the input.
        for file, known in zip(self.files, before, strict=True):
            if self._has_changed(file, known):
                return f"the input {file.name} has changed"
        return None

    def _has_changed(self, file: InputFile, known: dict[str, Any]) -> bool:
        version = self.inputs.version(file.path)
        # Cheap to ask for, and enough as long as nobody has touched the file.
        if version.items() <= known.items():
            return False
        # Another machine may show another time for the same bytes, so the bytes decide.
        same_size = version["bytes"] == known["bytes"] and "sha256" in known
        return not same_size or self.inputs.checksum(file.path) != known["sha256"]

    def check_unchanged(self, number: int) -> None:
        """Refuse to make an output of parts of which some may be of an older version of the input.

        Raises:
            UserError: somebody has written to it since the job began.
        """
        if self._has_changed(self.files[number], self.record["inputs"][number]):
            raise UserError(
                f"{self.files[number].path}: changed while it was scored; begin again with "
                "--restart",
                code="score-job-changed",
            )

    @property
    def finished(self) -> bool:
        return bool(self.record.get("finished"))

    def is_finished_on_disk(self) -> bool:
        """Whether this or another process has finished the job."""
        record = json.loads(self.outputs.read(self.record_path) or b"{}")
        if record.get("finished"):
            self.record = record
        return self.finished

    def finish(self, rows: int) -> None:
        """All outputs are complete: note it, and remove the parts."""
        if not self.is_finished_on_disk():
            # The record before the parts: killed between the two, the next start finds the job
            # finished and removes what is left. The other way round, it would score everything
            # again.
            self.record = {**self.record, "finished": True, "rows": rows}
            self.outputs.write(self.record_path, _json(self.record))
        self._remove_parts()


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def plan_job(source: str, out: str, settings: dict[str, Any]) -> Job:
    """Which files are read, and where the rows of each go.

    Raises:
        UserError: there is nothing to read, OUT cannot be that of this IN, or would overwrite it.
    """
    inputs, outputs = storage_of(source), storage_of(out)
    source, out = (one.rstrip("/") if len(one) > 1 else one for one in (source, out))
    found = _without_own_files(inputs.find(source), source, out, inputs, outputs)
    if not found:
        what = "matches no file" if set(source) & set("*?[") else "no such file or folder"
        what = "holds no file" if inputs.is_folder(source) else what
        raise UserError(f"{source}: {what}", code="data-not-found")
    if _is_one_file(source, found, inputs):
        files = [_single_file(source, found[0], out, outputs)]
    else:
        files = _files_of(source, found, out, settings["format"], inputs)
    _refuse_overwriting(source, out, files, inputs, outputs)
    if not is_remote(out):
        _refuse_unwritable(out)
    return Job(source, out, files, inputs, outputs, settings)


def _is_one_file(source: str, found: list[str], inputs: Storage) -> bool:
    """Whether IN names one file, so that OUT does; a pattern that matches one file does not."""
    if found == [source] and not inputs.is_folder(source):
        return True
    # A driver gives addresses back in its own spelling.
    return is_remote(source) and len(found) == 1 and inputs.absolute(source) == found[0]


def _single_file(source: str, found: str, out: str, outputs: Storage) -> InputFile:
    in_suffix = _known_format(source, source)
    out_suffix = PurePosixPath(out).suffix.lower()
    if out_suffix not in OUT_FORMATS:
        raise UserError(f"{out}: must end in {', '.join(OUT_FORMATS)}", code="data-format")
    if outputs.is_folder(out):
        raise UserError(f"{out}: is a folder; name a file in it", code="not-writable")
    return InputFile(found, PurePosixPath(source).name, out, in_suffix, out_suffix)


def _refuse_unwritable(out: str) -> None:
    above = nearest_folder(Path(out).absolute().parent)
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(
            f"{out}: cannot be written ({above} is not a folder that you may write to); name "
            "another OUT",
            code="not-writable",
        )


def _without_own_files(
    found: list[str], source: str, out: str, inputs: Storage, outputs: Storage
) -> list[str]:
    """What a pattern matches, without what this job has written since it began."""
    if is_remote(source) != is_remote(out):
        return found
    target, folder = outputs.absolute(out), inputs.absolute(_before_wildcards(source))
    if f"{folder}/".startswith(
        f"{target}/"
    ):  # the input itself lies in OUT, which is refused later
        return found
    own = (f"{target}/", f"{target}.parts/", f"{target}.job.json")
    return [path for path in found if not f"{inputs.absolute(path)}/".startswith(own)]


def _before_wildcards(source: str) -> str:
    """The folder of a pattern before its first wildcard; of anything else, all of it."""
    while set(source) & set("*?["):
        source = source.rpartition("/")[0]
    return source


def _known_format(path: str, given: str) -> str:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix not in FORMATS:
        raise UserError(
            f'{given}: must end in {", ".join(FORMATS)}; save a spreadsheet as "CSV UTF-8"',
            code="data-format",
        )
    return suffix


def _files_of(
    source: str, found: list[str], out: str, wanted: str, inputs: Storage
) -> list[InputFile]:
    """The files of a folder or a pattern that hold rows, each with its place below OUT."""
    if PurePosixPath(out).suffix.lower() in OUT_FORMATS:
        raise UserError(
            f"{out}: names one file, and {source} matches {len(found)}; name a folder",
            code="data-format",
        )
    folder = inputs.plain(_before_wildcards(source))
    files: dict[str, InputFile] = {}  # by their output
    for path in found:
        suffix = PurePosixPath(path).suffix.lower()
        if suffix not in FORMATS:
            continue
        name = inputs.plain(path).removeprefix(folder).lstrip("/")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            what = "the name is not UTF-8 text; rename the file"
            raise UserError(f"{path!a}: {what}", code="data-unreadable") from error
        out_suffix = f".{wanted}" if wanted else {".json": ".jsonl"}.get(suffix, suffix)
        target = f"{out}/{name[: len(name) - len(suffix)]}{out_suffix}"
        # Such as a.csv and a.tsv, when both are to become Parquet.
        if target in files:
            raise UserError(
                f"{path}: its rows would go to {target}, like those of {files[target].path}; "
                "rename one",
                code="score-overwrites",
            )
        files[target] = InputFile(path, name, target, suffix, out_suffix)
    if not files:
        raise UserError(
            f"{source}: holds no file that ends in {', '.join(FORMATS)}", code="data-not-found"
        )
    return list(files.values())


def _refuse_overwriting(
    source: str, out: str, files: list[InputFile], inputs: Storage, outputs: Storage
) -> None:
    if is_remote(source) != is_remote(out):
        return
    ours = inputs.absolute(source)
    target = outputs.absolute(out)
    if inputs.is_folder(source) and (target == ours or target.startswith(ours + "/")):
        raise UserError(
            f"{out}: is in {source}, so the output would become input of the next start; name a "
            "folder elsewhere",
            code="score-overwrites",
        )
    for file in files:
        path = inputs.absolute(file.path)
        if path == target or path.startswith(target + "/"):
            raise UserError(
                f"{out}: is IN itself or contains it; name another OUT", code="score-overwrites"
            )


class Claims:
    """What this process is working on, kept fresh by a thread until it is closed."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._held: set[str] = set()
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._beat = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # Enough to see, on the same machine, that a process is gone: then nobody needs to wait for
        # its lease.
        self._owner = {
            "host": platform.node(),
            "boot": _read("/proc/sys/kernel/random/boot_id"),
            "processes": _namespace(),
            "pid": os.getpid(),
            "started": _start_of(os.getpid()),
            "token": secrets.token_hex(8),
        }
        threading.Thread(target=self._keep_fresh, name="claims", daemon=True).start()

    def take(self, path: str) -> bool:
        """Claim, or take over a claim whose process is gone."""
        with self._lock:
            # To create is atomic, to take over is not: two processes that find a claim abandoned at
            # the same moment both work on the part, and write the same bytes.
            taken = self._storage.create(path, self._contents())
            if not taken and self._is_abandoned(path):
                self._storage.write(path, self._contents())
                taken = True
            if taken:
                self._held.add(path)
            return taken

    def release(self, path: str) -> None:
        with self._lock:
            self._held.discard(path)
            self._storage.remove(path)

    def close(self) -> None:
        self._closed.set()
        for path in list(self._held):
            with contextlib.suppress(OSError, UserError):
                self.release(path)

    def _contents(self) -> bytes:
        return json.dumps({**self._owner, "beat": self._beat}).encode()

    def _is_abandoned(self, path: str) -> bool:
        contents = self._storage.read(path)
        if contents is None:  # its owner has just finished: the next look will tell
            return False
        with contextlib.suppress(ValueError, KeyError, TypeError):
            owner = json.loads(contents)
            # Within one boot and one namespace of processes a pid means the same to both. It may
            # have been given to another process since, so the time of its start has to match, too.
            same_kernel = all(
                owner[name] and owner[name] == self._owner[name] for name in ("boot", "processes")
            )
            if same_kernel and _start_of(owner["pid"]) != owner["started"]:
                return True
        # Of another machine only its beat tells that it lives: it has to change within the lease.
        before, since = self._seen.get(path, (b"", 0.0))
        if contents != before:
            self._seen[path] = (contents, time.monotonic())
            return False
        return time.monotonic() - since > LEASE_SECONDS

    def _keep_fresh(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self._beat += 1
            for path in list(self._held):
                # A full disk or a lost network must not end the work; at worst it is done twice.
                with self._lock, contextlib.suppress(OSError, UserError):
                    if path in self._held:
                        self._storage.write(path, self._contents())


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    """Within which process numbers mean the same."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _start_of(pid: int) -> str:
    """When a process began, in ticks since the machine did; empty if it has ended."""
    fields = process_fields(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""


class FileParts:
    """The parts of one input file: which are finished, and where they begin."""

    def __init__(self, job: Job, number: int) -> None:
        self.file = job.files[number]
        self._job, self._storage = job, job.outputs
        self._number = number
        self._reader: PartReader | None = None
        # By part. A place is found by reading the part before, so those that are known are kept
        # here, and on disk for the other processes.
        self._places: dict[int, Place] = {0: Place()}
        self._last = (0, Place())  # the furthest that is known
        self._size = 0  # in what places count: bytes, or rows of Parquet

    @property
    def folder(self) -> str:
        return f"{self._job.parts_folder}/{self._job.fingerprint}-{self._number}"

    @property
    def reader(self) -> PartReader:
        """Opened when it is first needed."""
        if self._reader is None:
            try:
                source = self._job.inputs.open(self.file.path)
            except OSError as error:
                why = error.strerror or error
                raise UserError(
                    f"{self.file.path}: cannot be read ({why})", code="data-unreadable"
                ) from error
            settings = self._job.settings
            path, suffix, text = self.file.path, self.file.suffix, settings["text_column"]
            pair = settings.get("pair_column", "")
            self._reader = open_parts(path, suffix, source, text, settings["part_rows"], pair)
            self._size = self._reader.num_rows or self._job.inputs.version(self.file.path)["bytes"]
        return self._reader

    def begin(self) -> None:
        self._storage.make_folder(self.folder)

    def close(self) -> None:
        """Free what reading holds."""
        self._reader = None

    def path(self, part: int | str, kind: str = "part") -> str:
        return f"{self.folder}/{part}.{kind}"

    def finished(self) -> set[int]:
        names = self._storage.names(self.folder)
        return {
            int(name[:-5]) for name in names if name.endswith(".part") and name[:-5].isdecimal()
        }

    @property
    def is_done(self) -> bool:
        # Somebody may have removed the output since; as long as its parts are there, they become it
        # again.
        return self._storage.exists(f"{self.folder}/done") and self._storage.exists(self.file.out)

    def count(self) -> int | None:
        """The number of parts; None if nobody has read the last one yet."""
        data = self._storage.read(f"{self.folder}/end")
        return int(data) if data else None

    def rows_done(self) -> int:
        return int(self._storage.read(f"{self.folder}/done") or 0)

    def note_done(self, rows: int) -> None:
        self._storage.write(f"{self.folder}/done", str(rows).encode())

    def read(self, number: int) -> Part | None:
        """A part's rows, also noting where the next one begins; None behind the last."""
        part = self.reader.read(self.place(number))
        if part.texts:
            # Before the part is scored, so that others need not wait for the next one.
            self._note_place(number + 1, part.end)
            return part
        self._storage.write(f"{self.folder}/end", str(number).encode())
        return None

    def place(self, number: int) -> Place:
        """Where a part begins; if nobody has noted it, the parts before it are read for that."""
        first = number
        # Part 0 begins at the beginning, so this ends.
        while (place := self._noted_place(first)) is None:
            first -= 1
        for i in range(first, number):
            place = self.reader.read(place).end
            self._note_place(i + 1, place)
        return place

    def _noted_place(self, number: int) -> Place | None:
        if number not in self._places:
            data = self._storage.read(self.path(number, "place"))
            if not data:
                return None
            self._remember(number, Place(*map(int, data.split())))
        return self._places[number]

    def _note_place(self, number: int, place: Place) -> None:
        if self._places.get(number) != place:
            self._remember(number, place)
            self._storage.write(
                self.path(number, "place"), f"{place.offset} {place.lines} {place.rows}".encode()
            )

    def _remember(self, number: int, place: Place) -> None:
        self._places[number] = place
        self._last = max(self._last, (number, place), key=lambda known: known[0])

    def position(self) -> float:
        """The share of the file that lies in finished parts, 0 to 1, if parts are equally large."""
        number, place = self._last
        if not number or not self._size:
            return 0.0
        return min(1.0, len(self.finished()) * place.offset / number / self._size)
