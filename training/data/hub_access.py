"""The hub: retried if it does not respond, asked by one process if the machines share a cache."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants, try_to_load_from_cache

from common.errors import ForeseenError, HubUnavailable, UserError, first_line, near_names

if TYPE_CHECKING:
    from training.distributed.ranks import Ranks

T = TypeVar("T")
# Seconds before each retry. Within each attempt, the hub's own client retries for up to 23 seconds.
RETRY_DELAYS = (2.0, 8.0, 30.0)
# If the name cannot be resolved there is usually no network, so only a short wait is worth it.
RESOLVE_DELAYS = (1.0, 2.0)
TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
# Base classes of what the HTTP clients raise when no answer comes: httpx and httpx2, requests,
# aiohttp.
NETWORK_ERRORS = frozenset({"TransportError", "RequestException", "ClientConnectionError"})
FILE_SUFFIXES = frozenset(
    {".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt", ".xls", ".xlsx", ".ods", ".gz", ".zip"}
    | {".pt", ".bin", ".safetensors", ".onnx"}
)


def looks_local(name: str) -> bool:
    """Whether a name can only be a path: names on the hub are ``name`` or ``owner/name``."""
    is_path = name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    return is_path or Path(name).suffix.lower() in FILE_SUFFIXES


def refuse_missing(dataset: str) -> None:
    """Refuse the path of a file or folder that is not there; needs no PyTorch."""
    path = Path(dataset).expanduser()
    if looks_local(dataset) and not (path.is_dir() or path.is_file()):
        raise UserError(f"--dataset {dataset}: no such file or folder", code="data-not-found")


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A suggestion for an error message, or nothing if no known name is similar."""
    near = near_names(name, known)
    return f"; did you mean {near[0]}?" if near else ""


def refuse_revision(flag: str, name: str) -> None:
    """Refuse ``owner/name@revision``: there is a flag for it."""
    if "@" in name:
        before, _, revision = name.partition("@")
        raise UserError(
            f"{flag} {name}: a revision has a flag of its own; use {flag} {before} "
            f"{flag}_revision {revision}",
            code="revision-in-name",
        )


def ask_hub(what: str, ask: Callable[[], T], say: Callable[[str], None]) -> T:
    """Ask the hub, and retry after a pause if it does not respond.

    Without a network the cache is tried once, as with ``HF_HUB_OFFLINE=1``.

    Raises:
        HubUnavailable: it never responded. Other exceptions of ``ask`` pass through.
    """
    if constants.is_offline_mode():
        return ask()
    if not _resolves(what, say):
        host = urlsplit(constants.ENDPOINT).hostname
        try:
            # The libraries would try to reach the host once for each file, and wait each time.
            with from_cache_only():
                return ask()
        except ForeseenError:
            raise
        except Exception as error:
            raise HubUnavailable(
                f"{what}: the name of the hub's host, {host}, could not be resolved, and it is "
                "not in the cache"
            ) from error
    delays = iter(RETRY_DELAYS)
    while True:
        try:
            return ask()
        except Exception as error:
            if (reason := _why_no_answer(error)) is None:
                raise
            failed = f"{what}: the hub did not answer ({reason})"
            if (delay := next(delays, None)) is None:
                attempts = len(RETRY_DELAYS) + 1
                raise HubUnavailable(f"{failed} in {attempts} attempts") from error
            say(f"{failed}; next attempt in {delay:g} s")
        time.sleep(delay)


def hub_may_have(model: str, revision: str = "") -> bool:
    """Whether a model is in the hub's cache, or the hub can be asked for it; in four seconds."""
    if isinstance(try_to_load_from_cache(model, "config.json", revision=revision or None), str):
        return True
    return not constants.is_offline_mode() and _resolves(f"--model {model}", lambda line: None)


def _resolves(what: str, say: Callable[[str], None]) -> bool:
    endpoint = urlsplit(constants.ENDPOINT)
    host, proxies = endpoint.hostname or "", getproxies()
    if (proxies.get(endpoint.scheme) or proxies.get("all")) and not proxy_bypass(host):
        return True  # the proxy resolves names
    for delay in (*RESOLVE_DELAYS, None):
        try:
            socket.getaddrinfo(host, endpoint.port or endpoint.scheme)
        except OSError as error:
            if delay is not None:
                say(
                    f"{what}: the hub did not answer ({host}: {error.strerror}); next attempt in "
                    f"{delay:g} s"
                )
                time.sleep(delay)
        else:
            return True
    return False


def _why_no_answer(error: BaseException | None) -> str | None:
    """Why the hub did not respond; None if it did, or if something else went wrong."""
    seen: set[int] = set()  # a chain of causes may be a ring
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return first_line(error) if status in TRANSIENT_STATUS else None
        # By name, because a client that is not installed has no class to compare with, and one that
        # is need not be imported for this.
        names = {base.__name__ for base in type(error).__mro__}
        if (
            isinstance(error, ConnectionError | TimeoutError | socket.gaierror)
            or names & NETWORK_ERRORS
        ):
            return first_line(error)
        # The libraries wrap the HTTP client's error in exceptions of their own.
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def from_cache_only() -> Iterator[None]:
    """As with ``HF_HUB_OFFLINE=1``, ask the hub nothing."""
    # Both libraries read the variable once, at import, and offer no way to change it later.
    switches = [
        constants,
        *([sys.modules["datasets.config"]] if "datasets.config" in sys.modules else []),
    ]
    before = [module.HF_HUB_OFFLINE for module in switches]
    try:
        for module in switches:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(switches, before, strict=True):
            module.HF_HUB_OFFLINE = value


def cache_is_shared(ranks: Ranks) -> bool:
    """Whether all machines see the same hub cache: a file that rank 0 writes is there for all."""
    if ranks.world_size == ranks.local_world_size:
        return False
    folders = (
        Path(constants.HF_HUB_CACHE).expanduser(),
        Path(os.environ.get("HF_DATASETS_CACHE", f"{constants.HF_HOME}/datasets")).expanduser(),
    )

    def put(name: str) -> None:
        with contextlib.suppress(OSError):  # without a cache nobody sees it, so it is not shared
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()

    def remove(name: str) -> None:
        for folder in folders:
            (folder / name).unlink(missing_ok=True)

    with ranks.probing(put, remove) as probe:
        return not ranks.any(not all((folder / probe).exists() for folder in folders))


def download_once(ranks: Ranks, work: Callable[[], T], *, shared: bool) -> T:
    """Run ``work``, which may download, on one rank first; the others find it in the cache.

    If the machines share a cache, rank 0 downloads; otherwise the first rank of each machine does.
    An error of ``work`` on any rank is raised on all.
    """
    leads = ranks.is_first if shared else ranks.local_rank == 0
    result: T | None = None

    def lead() -> None:
        nonlocal result
        if leads:
            result = work()

    def follow() -> None:
        nonlocal result
        if not leads:
            with from_cache_only():
                result = work()

    # Two collective calls: the first one ends when every leading rank has downloaded.
    ranks.run_on_all_ranks(lead)
    ranks.run_on_all_ranks(follow)
    return result
