"""The Ray cluster that a command runs on: a running one, or a local one for this command."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from common.errors import UserError, first_line

# Neither training nor serving passes arrays through Ray: its store is near its smallest, so that it
# fits a container.
_STORE_BYTES = 128 * 2**20
# Ray gives its processes 30 s to come up, which a busy machine exceeds.
_ATTEMPTS_TO_START = 3


def connect(
    address: str | None,
    *,
    dashboard: bool = False,
    environment: Mapping[str, str] | None = None,
    flag: str = "--address",
) -> bool:
    """Connect to the cluster at an address (``auto``: this machine's), or at RAY_ADDRESS; without
    either, start one here. ``flag``: what gave the address.

    Ray's usage statistics stay off unless RAY_USAGE_STATS_ENABLED says otherwise. A ``dashboard``
    is for this machine only; Ray Train asks it for the state of its workers. Returns whether the
    cluster was started here.

    Raises:
        UserError: Ray is missing, or no cluster answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", str(int(sys.stderr.isatty())))
    try:
        import ray
    except ImportError:
        raise UserError(
            'Ray is not installed: pip install "distrinews[ray]"', code="package-missing"
        ) from None
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    is_local = address == "local"
    if ray.is_initialized():  # by an earlier run of this process
        return is_local
    options: dict[str, Any] = {"runtime_env": {"env_vars": dict(environment or {})}}
    if is_local:
        options |= {"include_dashboard": dashboard, "object_store_memory": _STORE_BYTES}
    for attempts_left in reversed(range(_ATTEMPTS_TO_START if is_local else 1)):
        try:
            ray.init(address, logging_level="ERROR", **options)
            break
        except Exception as error:  # it raises plain ones too
            ray.shutdown()  # what did come up
            if not attempts_left:
                raise _unreachable(f"{flag} {address}", error, is_local=is_local) from error
    return is_local


def _unreachable(where: str, error: Exception, *, is_local: bool) -> UserError:
    what = "does not start" if is_local else "does not answer"
    remedy = "ray start --head starts a cluster"
    return UserError(f"{where}: Ray {what} ({first_line(error)}); {remedy}", code="ray-unreachable")


def check_room(what: str, wanted: Mapping[str, float], flag: str = "--address") -> None:
    """Refuse what a one-machine cluster would wait for forever; larger clusters may grow.
    ``wanted``: counts by Ray's names.
    """
    import ray

    has = ray.cluster_resources()
    for kind, count in wanted.items():
        if has.get(kind, 0) < count:
            raise UserError(
                f"{what}: takes {count:g} {kind}s and this machine has {has.get(kind, 0):g}; "
                f"ask for less, or name a larger cluster with {flag}",
                code="ray-too-small",
            )
