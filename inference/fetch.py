"""Fetch an exported model: python -m inference.fetch ADDRESS FOLDER."""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.credentials import without_password
from common.errors import ModelLoadError, OneLineParser, UserError, above_zero, run_command
from common.escaping import printable
from common.files import open_lock, remove_unfinished, sha256_of, writing_folder
from common.model_folder import (
    DESCRIPTION_FILES,
    MANIFEST_FILE,
    PRECISIONS,
    SMALL_FOLDER,
    Manifest,
    is_artefact,
    read_manifest,
    verified_manifest,
    verify_files,
)
from inference.model_sources import Source, SourceUnreachable, source_at

# A large one has hundreds of probes and weighs 100 kB.
_MOST_MANIFEST_BYTES = 4 << 20
_DELAYS = (1.0, 4.0)
_LONGEST_TIMER = 1e8  # three years; the system takes no number
_FETCH_AGAIN = "export the model again, and upload all of it before its manifest.json"
_DESCRIPTION = """Fetch an exported model into FOLDER, and check every file against the SHA-256 in
its manifest.json.

ADDRESS is an artefact that an export wrote (such as MODEL/native), a cascade (MODEL/cascade), or a
folder with artefacts in native/, onnx/ or openvino/, all of which are fetched:
hf://owner/name[@revision][/folder], https://host/folder, s3://bucket/folder, or a path. Weights
before the export are left out. FOLDER has all of the model or is not there; if it has the same
model already, only the manifests are asked for."""


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m inference.fetch",
        description=_DESCRIPTION,
        epilog="HF_TOKEN is sent to the hub, FETCH_TOKEN to other hosts (as Bearer), and neither "
        "follows a redirect to another host. Exit codes: 0 the model is there, 1 the source did "
        "not answer, 2 what was asked for is not possible.",
    )
    parser.add_argument("address", metavar="ADDRESS", help="where the model is")
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="where to put it; not a mount point itself"
    )
    parser.add_argument(
        "--manifest_sha256",
        metavar="HASH",
        type=_sha256,
        # An empty variable counts as unset, as it does for the server.
        default=os.environ.get("MANIFEST_SHA256") or None,
        help="take only this manifest.json, of one artefact; then it does not matter who can "
        "write to ADDRESS (default: MANIFEST_SHA256)",
    )
    parser.add_argument(
        "--most_gb", metavar="N", type=above_zero, default=4.0, help="refuse a larger model (4)"
    )
    parser.add_argument(
        "--timeout_s", metavar="N", type=above_zero, default=1800.0, help="give up after (1800)"
    )
    return parser.parse_args(arguments)


def _sha256(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", text.lower()):
        raise argparse.ArgumentTypeError(f"{text}: must be 64 hex digits")
    return text.lower()


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    folder, began = options.folder.absolute(), time.monotonic()
    deadline = began + options.timeout_s
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The wait for the lock is within the time limit too. With a pinned manifest, what is there
        # can be judged without asking anybody, so a restart needs no network.
        with _within(options.timeout_s, options.address), _locked(folder):
            if options.manifest_sha256 and _has_manifest(folder, options.manifest_sha256):
                print(
                    f"{folder}: is already there, with the manifest that --manifest_sha256 names",
                    flush=True,
                )
                return
            source = source_at(options.address, is_pinned=bool(options.manifest_sha256))
            manifests = _find_manifests(source, deadline, options.manifest_sha256)
            if _holds(folder, manifests):
                print(printable(f"{folder}: is already there, as at {options.address}"), flush=True)
                return
            num_bytes = _fetch(source, manifests, folder, deadline, options.most_gb)
    except OSError as error:
        raise UserError(_in_one_line(folder, error), code="not-writable") from error
    engines = ", ".join(engine or "one artefact" for engine in manifests)
    print(
        f"{folder}: {engines}, {num_bytes / 1e6:,.1f} MB in {time.monotonic() - began:.1f} s",
        flush=True,
    )


@contextmanager
def _within(seconds: float, address: str) -> Iterator[None]:
    """Give up after this time, whatever is being waited for then: a name, a header, a bucket."""

    def give_up(*_: object) -> None:
        raise SourceUnreachable(
            f"{without_password(address)}: not complete within --timeout_s {seconds:g}"
        )

    # A timer of the system: no library's own timeout covers the resolution of names, nor a server
    # that sends one byte per minute.
    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, _LONGEST_TIMER))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _find_manifests(source: Source, deadline: float, pin: str | None) -> dict[str, bytes]:
    """The manifests below the address by folder: "" if it is an artefact, or one for each in it."""
    found: dict[str, bytes] = {}
    for engine in ("", *PRECISIONS):
        path = f"{engine}/{MANIFEST_FILE}".lstrip("/")
        try:
            found[engine] = _read_whole(source, path, deadline)
        except FileNotFoundError:
            continue
        # The address is an artefact itself, so there are no others below it, but of a cascade the
        # small model.
        if engine == "":
            found |= _small_model(source, found[""], deadline)
            break
    if not found:
        what = f"has no {MANIFEST_FILE}, nor a folder native, onnx or openvino with one"
        remedy = "export the model (python -m inference.export MODEL) and upload what that wrote"
        raise UserError(f"{source.address}: {what}; {remedy}", code="fetch-address")
    if pin and "" not in found:
        what = "--manifest_sha256 names one manifest; give the address of one artefact: "
        what += f"{source.address}/{next(iter(found))}"
        raise UserError(what, code="fetch-address")
    if pin and (other := hashlib.sha256(found[""]).hexdigest()) != pin:
        raise ModelLoadError(
            f"{source.address}/{MANIFEST_FILE}", f"its SHA-256 is {other}, not {pin}", _FETCH_AGAIN
        )
    return found


def _small_model(source: Source, manifest: bytes, deadline: float) -> dict[str, bytes]:
    """Of a cascade, the manifest of the small model inside, which that of the big one names."""
    if not (expected := _small_sha256(manifest)):
        return {}
    path = f"{SMALL_FOLDER}/{MANIFEST_FILE}"
    try:
        found = _read_whole(source, path, deadline)
    except FileNotFoundError as error:
        raise ModelLoadError(f"{source.address}/{path}", "is missing", _FETCH_AGAIN) from error
    if hashlib.sha256(found).hexdigest() != expected:
        what = "is not the small model that this cascade was certified with"
        raise ModelLoadError(f"{source.address}/{path}", what, _FETCH_AGAIN)
    return {SMALL_FOLDER: found}


def _small_sha256(manifest: bytes) -> str:
    """What the manifest of a cascade says of its small model's; empty if this is no cascade."""
    try:
        cascade = json.loads(manifest).get("cascade")
        return cascade["small"]["manifest_sha256"] if cascade else ""
    except (AttributeError, LookupError, TypeError, ValueError):
        return ""  # damaged, which is reported when the manifest or the model is read


def _read_whole(source: Source, path: str, deadline: float) -> bytes:
    # None stands for the last attempt, whose failure is final.
    for delay in (*_DELAYS, None):
        data = b""
        try:
            for piece in source.read(path):
                data += piece
                # Counted while it arrives: a source may announce any length, or send without end.
                if len(data) > _MOST_MANIFEST_BYTES:
                    what = f"has more than {_MOST_MANIFEST_BYTES:,} bytes, which no manifest has"
                    raise UserError(f"{source.address}/{path}: {what}", code="fetch-address")
        except SourceUnreachable as error:
            _wait_or_raise(error, delay, deadline)
        else:
            return data
    raise AssertionError


def _fetch(
    source: Source, manifests: dict[str, bytes], folder: Path, deadline: float, most_gb: float
) -> int:
    """Fetch the files of all manifests, and return how many bytes they have."""
    # The folder is replaced by a rename, which would replace the link and not what it leads to.
    if folder.is_symlink():
        what = (
            f"is a symbolic link to {folder.readlink()}; fetch into a new folder, then let the "
            "link lead there"
        )
        raise UserError(f"{folder}: {what}", code="not-writable")
    if folder.exists() and not _is_model(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder}: holds something other than a fetched model; name another FOLDER",
            code="not-writable",
        )
    # Under the lock, so what lies here unfinished is of processes that were killed.
    remove_unfinished(folder)
    num_bytes = 0
    with writing_folder(folder) as aside:
        for engine, data in manifests.items():
            (aside / engine).mkdir(exist_ok=True)
            (aside / engine / MANIFEST_FILE).write_bytes(data)
            with _naming(source, aside):
                manifest = read_manifest(aside / engine)
            sizes = _sizes(f"{source.address}/{engine}".rstrip("/"), manifest)
            num_bytes += sum(sizes.values())
            # Known from the manifests, before anything large is fetched.
            if num_bytes > most_gb * 1e9:
                what = f"{num_bytes:,} bytes are more than --most_gb {most_gb:g} allows"
                raise UserError(f"{source.address}: {what}", code="fetch-address")
            for name, size in sizes.items():
                _download(
                    source, f"{engine}/{name}".lstrip("/"), aside / engine / name, size, deadline
                )
            with _naming(source, aside):
                verify_files(aside / engine, manifest)
        _complete(source, aside, list(manifests))
        # All is here: the time must not end between two renames.
        signal.setitimer(signal.ITIMER_REAL, 0)
    return num_bytes


def _sizes(address: str, manifest: Manifest) -> dict[str, int]:
    for name, described in manifest.files.items():
        # A name with a slash or with dots in front could be written outside the folder.
        is_plain = re.fullmatch(r"\w[\w.-]*", name) and name != MANIFEST_FILE
        size = described.get("bytes") if isinstance(described, dict) else None
        if not is_plain or not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ModelLoadError(
                f"{address}/{MANIFEST_FILE}", f"{name!r} is not a file with a size", _FETCH_AGAIN
            )
    return {name: described["bytes"] for name, described in manifest.files.items()}


def _download(source: Source, path: str, target: Path, size: int, deadline: float) -> None:
    for delay in (*_DELAYS, None):
        try:
            with target.open("wb") as file:
                for piece in source.read(path):
                    file.write(piece)
                    # Nor may a source fill the disk by sending without end.
                    if file.tell() > size:
                        what = f"has more than the {size:,} bytes of its manifest"
                        raise ModelLoadError(f"{source.address}/{path}", what, _FETCH_AGAIN)
            return
        except FileNotFoundError as error:
            raise ModelLoadError(f"{source.address}/{path}", "is missing", _FETCH_AGAIN) from error
        except SourceUnreachable as error:
            _wait_or_raise(error, delay, deadline)


def _wait_or_raise(error: SourceUnreachable, delay: float | None, deadline: float) -> None:
    if delay is None or time.monotonic() + delay > deadline:
        raise error
    print(printable(f"{error}; next attempt in {delay:g} s"), flush=True)
    time.sleep(delay)


@contextmanager
def _naming(source: Source, aside: Path) -> Iterator[None]:
    """Let errors name the address instead of the temporary folder, which nobody will find."""
    try:
        yield
    except ModelLoadError as error:
        what = str(error).replace(str(aside), source.address).rpartition(";")[0]
        raise ModelLoadError(f"{what}; {_FETCH_AGAIN}") from error


def _complete(source: Source, folder: Path, engines: list[str]) -> None:
    """Give a folder of artefacts what a model folder has besides weights, from a copy."""
    if "" in engines:
        return
    weights = {read_manifest(folder / engine).source.get("weights_sha256") for engine in engines}
    if len(weights) > 1:
        what = f"{' and '.join(engines)} were made from different weights"
        raise ModelLoadError(
            source.address, what, f"{_FETCH_AGAIN}, or give the address of one: /{engines[0]}"
        )
    for name in (*DESCRIPTION_FILES, "metrics.json"):
        # Any of them will do: all were made from the same weights, and have the same copies.
        if (copy := folder / engines[0] / name).is_file():
            shutil.copyfile(copy, folder / name)


def _holds(folder: Path, manifests: dict[str, bytes]) -> bool:
    """Whether a folder has these manifests, no others, and every file as they say."""
    # The cheap questions come first; only at the end are all files read and hashed.
    places = ("", SMALL_FOLDER, *PRECISIONS)
    there = [engine for engine in places if is_artefact(folder / engine)]
    if there != list(manifests):
        return False
    for engine, data in manifests.items():
        if (folder / engine / MANIFEST_FILE).read_bytes() != data:
            return False
    try:
        return all(_is_whole(folder, engine) for engine in manifests)
    except ModelLoadError:
        return False


def _is_whole(folder: Path, engine: str) -> bool:
    is_in_model = engine in PRECISIONS  # or else an artefact alone, or the small model in one
    manifest = verified_manifest(folder / engine, folder if is_in_model else None)
    # The copies that `_complete` makes for the model folder itself.
    copied = [name for name in DESCRIPTION_FILES if is_in_model and name in manifest.files]
    return all((folder / name).is_file() for name in copied)


def _has_manifest(folder: Path, sha256: str) -> bool:
    path, small = folder / MANIFEST_FILE, folder / SMALL_FOLDER / MANIFEST_FILE
    if not path.is_file() or sha256_of(path) != sha256:
        return False
    manifests = {"": path.read_bytes()}
    if expected := _small_sha256(manifests[""]):
        if not small.is_file() or sha256_of(small) != expected:
            return False
        manifests[SMALL_FOLDER] = small.read_bytes()
    return _holds(folder, manifests)


def _is_model(folder: Path) -> bool:
    return any(is_artefact(folder / engine) for engine in ("", *PRECISIONS))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process fetches into this folder; the lock ends with its process."""
    with open_lock(folder.with_name(f".{folder.name}.lock")) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _in_one_line(folder: Path, error: OSError) -> str:
    if error.errno == errno.EBUSY:
        return (
            f"{folder}: is a mount point, which cannot be replaced in one step; name a folder "
            "inside it"
        )
    return (
        f"{folder}: cannot be written ({error.strerror or error}); free some space, or name "
        "another FOLDER"
    )


if __name__ == "__main__":
    run_command(main)
