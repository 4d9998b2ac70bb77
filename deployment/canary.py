"""Move a route's requests to a canary step by step, and all of them back if it fails more often or
is slower.

python deployment/canary.py ROUTE --namespace NAMESPACE --prometheus URL
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlencode, urlsplit

# A script finds only its own folder by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import (
    ForeseenError,
    OneLineParser,
    UserError,
    above_zero,
    first_line,
    positive,
    run_command,
)
from deployment.client import fetch_json

# A rate needs a few scrapes, which are 15 s apart.
_SHORTEST_WINDOW_S = 60
# A step without enough requests is extended so often.
_MOST_EXTENSIONS = 3
_MOST_SILENCE = 5  # questions in a row that Prometheus does not answer
_ATTEMPTS_TO_ROLL_BACK = 5
_KUBECTL_SECONDS = 60
# Twice as slow does not matter below this.
_ALWAYS_FAST_ENOUGH_S = 0.05


class CanaryFailure(ForeseenError):
    """The canary does not get all requests."""

    code = "canary-failed"


class Unanswered(Exception):
    """Prometheus gave no answer that can be used."""


@dataclass(frozen=True)
class Measured:
    """What a Service's servers did in a window."""

    requests: float = 0.0
    failed: float = 0.0  # share of the requests
    p99_s: float | None = None  # None without requests
    ready: float = 0.0  # servers that can answer

    def __str__(self) -> str:
        slow = "" if self.p99_s is None else f", p99 {self.p99_s:.3f} s"
        return f"{self.requests:,.0f} requests, {self.failed:.2%} failed{slow}"


@dataclass(frozen=True)
class Route:
    """An HTTPRoute with two backends, whose weights are percent."""

    name: str
    namespace: str
    stable: str
    canary: str

    def set_weight(self, percent: int) -> None:
        """Give the canary this share of the requests, in every rule of the route that has both
        backends.

        Raises:
            UserError: there is no such route, it has no rule with both, or kubectl refuses.
        """
        refs = self._backends()
        operations: list[dict[str, Any]] = []
        for path, backends in refs.items():
            names = [backend["name"] for backend in backends]
            if {self.stable, self.canary} <= set(names):
                if len(names) > 2:
                    what = (
                        f"has backends other than {self.stable} and {self.canary}; only two can "
                        "share the requests"
                    )
                    raise UserError(f"httproute {self.name}: {what}", code="canary-route")
                for position, name in enumerate(names):
                    pointer = f"{path}/{position}"
                    # A JSON patch names backends by position, so it first tests the name there: if
                    # somebody has changed the route meanwhile, nothing is written.
                    operations.append({"op": "test", "path": f"{pointer}/name", "value": name})
                    weight = percent if name == self.canary else 100 - percent
                    # `add` sets a weight whether the rule has one or not; `replace` would fail
                    # without one.
                    operations.append({"op": "add", "path": f"{pointer}/weight", "value": weight})
        if not operations:
            what = f"no rule has both backends, {self.stable} and {self.canary}"
            raise UserError(
                f"httproute {self.name}: {what}; see deployment/kubernetes/gateway",
                code="canary-route",
            )
        self._kubectl(
            "patch", "httproute", self.name, "--type=json", f"--patch={json.dumps(operations)}"
        )

    def _backends(self) -> dict[str, list[dict[str, Any]]]:
        route = json.loads(self._kubectl("get", "httproute", self.name, "--output=json"))
        rules = enumerate(route["spec"].get("rules", []))
        return {
            f"/spec/rules/{number}/backendRefs": rule.get("backendRefs", [])
            for number, rule in rules
        }

    def _kubectl(self, *arguments: str) -> str:
        command = ["kubectl", f"--namespace={self.namespace}", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_KUBECTL_SECONDS)
        except FileNotFoundError as error:
            raise UserError(
                "kubectl is not on the PATH; install it", code="canary-route"
            ) from error
        except subprocess.TimeoutExpired as error:
            what = f"kubectl {arguments[0]}: no answer within {_KUBECTL_SECONDS} s"
            raise UserError(
                f"{what}; check the connection to the cluster", code="canary-route"
            ) from error
        if done.returncode:
            said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise UserError(
                f"kubectl {arguments[0]} httproute {self.name}: {said}", code="canary-route"
            )
        return done.stdout


@dataclass(frozen=True)
class Rule:
    """When a canary is good enough, beside the stable servers."""

    least_requests: int
    most_failed: float
    most_slower: float

    def broken(self, canary: Measured, stable: Measured) -> str | None:
        """Why the canary should get no more requests; None if it may."""
        # What the gateway answers in the place of servers that are gone is in none of their
        # metrics: without this a canary that is down would look perfect.
        if canary.ready == 0:
            return "none of its servers is ready"
        # A difference and not a ratio: beside servers that fail nothing, a single failure would be
        # infinitely worse. A p99 is never zero, so below it can be a ratio.
        if canary.failed > stable.failed + self.most_failed:
            return (
                f"it fails {canary.failed:.2%} of its requests, the stable servers "
                f"{stable.failed:.2%}"
            )
        if canary.p99_s is None or stable.p99_s is None or canary.p99_s <= _ALWAYS_FAST_ENOUGH_S:
            return None
        if canary.p99_s > stable.p99_s * self.most_slower:
            return (
                f"its p99 is {canary.p99_s:.3f} s, that of the stable servers {stable.p99_s:.3f} s"
            )
        return None


def queries(route: Route, path: str, seconds: int) -> dict[str, str]:
    """The questions to Prometheus, each answered by a value for each Service."""
    which = f'namespace="{route.namespace}", service=~"{route.stable}|{route.canary}"'
    # Only POSTs count: probes and scrapes always succeed, and would dilute the share of failures.
    posts, window = f'distrinews_requests_total{{{which}, method="POST"', f"[{seconds}s]"
    buckets = f'distrinews_request_seconds_bucket{{{which}, route="{path}"}}{window}'
    return {
        "ready": f"sum by (service) (distrinews_model_ready{{{which}}})",
        "requests": f"sum by (service) (increase({posts}}}{window}))",
        "failed": f'sum by (service) (increase({posts}, status=~"5.."}}{window}))',
        # The buckets of a Service's servers are added before the quantile is taken: quantiles of
        # several servers cannot be averaged.
        "p99_s": f"histogram_quantile(0.99, sum by (service, le) (rate({buckets})))",
    }


def models_query(route: Route) -> str:
    """The question which models the servers of both Services have."""
    which = f'namespace="{route.namespace}", service=~"{route.stable}|{route.canary}"'
    by = "service, model_name, revision, replaces"
    return f"count by ({by}) (distrinews_model_info{{{which}}} == 1)"


def measure(prometheus: str, route: Route, path: str, seconds: int) -> dict[str, Measured]:
    """What the servers of both Services did in the last seconds, by Service.

    Raises:
        Unanswered: Prometheus does not answer, or not with numbers.
    """
    asked = queries(route, path, seconds)
    # A Service without requests has no series, which is zero requests and no failure; but it has no
    # p99 either, and a p99 of zero would look fast.
    values = {name: _ask(prometheus, query) for name, query in asked.items()}
    found = {}
    for service in (route.stable, route.canary):
        requests = values["requests"].get(service, 0.0)
        failed = values["failed"].get(service, 0.0) / requests if requests else 0.0
        found[service] = Measured(
            requests, failed, values["p99_s"].get(service), values["ready"].get(service, 0.0)
        )
    return found


def _ask(prometheus: str, query: str) -> dict[str, float]:
    values = {one["service"]: value for one, value in _series(prometheus, query)}
    # A quantile over buckets without requests is NaN.
    return {service: value for service, value in values.items() if math.isfinite(value)}


def _series(prometheus: str, query: str) -> list[tuple[dict[str, str], float]]:
    try:
        answer = fetch_json(f"{prometheus}/api/v1/query?{urlencode({'query': query})}")
        result = answer["data"]["result"]
        found = [(dict(one["metric"]), float(one["value"][1])) for one in result]
        if not all("service" in labels for labels, _ in found):
            raise LookupError("a series has no label service")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Unanswered(first_line(error)) from error
    return found


def unjudged(route: Route, models: Sequence[Mapping[str, str]]) -> str | None:
    """Which model of the canary has no verdict that lets it replace the stable one; None if each
    has one, or is the same model.

    ``models``: the labels of `models_query`.
    """
    stable: dict[str, set[str]] = {}
    for one in models:
        if one["service"] == route.stable:
            stable.setdefault(one.get("model_name", ""), set()).add(one.get("revision", ""))
    for one in models:
        live = stable.get(one.get("model_name", ""), set())
        if one["service"] == route.canary and live.isdisjoint(
            (one.get("revision", ""), one.get("replaces", ""))
        ):
            revision, others = one.get("revision"), ", ".join(sorted(live)) or "of no such model"
            return f"it serves revision {revision}, which no verdict lets replace {others}"
    return None


def main() -> None:
    options = _parse()
    route = Route(options.route, options.namespace, options.stable, options.canary)
    if options.weight is not None:
        route.set_weight(options.weight)
        print(f"{route.canary} gets {options.weight}% of the requests", flush=True)
        return
    signal.signal(signal.SIGTERM, _interrupt)
    rule = Rule(options.least_requests, options.most_failed / 100, options.most_slower)
    _check_ready(route, options)
    # What is wrong with the route shows before anybody is sent to the canary.
    route.set_weight(0)
    try:
        stable = Measured()
        for percent in options.steps:
            route.set_weight(percent)
            print(f"{route.canary} gets {percent}% of the requests", flush=True)
            stable = _watch(route, options, rule, stable)
    except BaseException as error:  # Ctrl-C and SIGTERM, too
        _roll_back(route)
        if isinstance(error, KeyboardInterrupt | ForeseenError):
            reason = "stopped" if isinstance(error, KeyboardInterrupt) else str(error)
            raise CanaryFailure(f"{route.canary}: rolled back, because {reason}") from error
        raise
    print(
        f"Promoted. Roll the same image out to {route.stable}, then give it its requests back with "
        "--weight 0."
    )


def _check_ready(route: Route, options: argparse.Namespace) -> None:
    try:
        # Once, before anything changes: a wrong address or namespace is a mistake in the command,
        # and no reason to roll back.
        found = measure(options.prometheus, route, options.path, _SHORTEST_WINDOW_S)
        models = [labels for labels, _ in _series(options.prometheus, models_query(route))]
    except Unanswered as error:
        raise UserError(
            f"--prometheus {options.prometheus}: no answer ({error})", code="canary-route"
        ) from error
    for service in (route.stable, route.canary):
        if found[service].ready == 0:
            what = "Prometheus knows of no server of it that is ready"
            raise UserError(
                f"{service} in {route.namespace}: {what}; see its pods and monitor",
                code="canary-route",
            )
    if what := unjudged(route, models):
        raise UserError(
            f"{route.canary}: {what}; compare them: python -m loop.verdict", code="not-promoted"
        )


def _watch(route: Route, options: argparse.Namespace, rule: Rule, before: Measured) -> Measured:
    """Watch one step to its end; returns what the stable servers did in it, or before it if they
    got no requests.

    Raises:
        CanaryFailure: the canary breaks the rule, gets too few requests to tell, or Prometheus does
            not answer.
    """
    began, silence = time.monotonic(), 0
    while True:
        time.sleep(options.every_s)
        elapsed = time.monotonic() - began
        # The window grows with the step and never reaches back before it: the requests of an
        # earlier, smaller share would hide what this share does to the canary.
        try:
            found = measure(
                options.prometheus, route, options.path, max(_SHORTEST_WINDOW_S, round(elapsed))
            )
        except Unanswered as error:
            # A question or two without an answer say nothing about the canary. After more, nobody
            # is watching it, and that is a reason to stop.
            silence += 1
            print(f"{elapsed:6.0f} s  Prometheus did not answer ({error})", flush=True)
            if silence >= _MOST_SILENCE:
                raise CanaryFailure(
                    f"Prometheus did not answer {silence} times in a row"
                ) from error
            continue
        silence, canary, stable = 0, found[route.canary], found[route.stable]
        print(f"{elapsed:6.0f} s  {route.canary}: {canary}; {route.stable}: {stable}", flush=True)
        # At 100% the stable servers get no requests: what they did before is what counts.
        stable = stable if stable.requests >= rule.least_requests else before
        # Judged at every look and not only at the end of the step: a bad canary is withdrawn at the
        # next one. A good one stays until the step is over.
        if canary.requests >= rule.least_requests or canary.ready == 0:
            if reason := rule.broken(canary, stable):
                raise CanaryFailure(reason)
            if elapsed >= options.step_s:
                return stable
        elif elapsed >= options.step_s * _MOST_EXTENSIONS:
            what = f"{canary.requests:,.0f} requests in {elapsed:,.0f} s are too few to tell"
            raise CanaryFailure(f"{what} (--least_requests {rule.least_requests})")


def _roll_back(route: Route) -> None:
    # A second Ctrl-C must not stop the one thing that is still to be done.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    for attempt in range(_ATTEMPTS_TO_ROLL_BACK):
        try:
            route.set_weight(0)
        except UserError as error:
            print(
                f"{error}; "
                f"{'next attempt in 2 s' if attempt < _ATTEMPTS_TO_ROLL_BACK - 1 else 'giving up'}",
                flush=True,
            )
            reason = error
            time.sleep(2)
        else:
            print(f"{route.stable} gets all requests again", flush=True)
            return
    what = (
        f"{route.canary}: NOT rolled back ({reason}); set its weight to 0 with kubectl edit "
        f"httproute {route.name}"
    )
    raise CanaryFailure(what)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parse() -> argparse.Namespace:
    parser = OneLineParser(
        description=__doc__,
        epilog="Exit codes: 0 promoted, 1 rolled back, 2 nothing was changed. Ctrl-C and SIGTERM "
        "roll back.",
    )
    add = parser.add_argument
    add("route", metavar="ROUTE", help="the HTTPRoute (deployment/kubernetes/gateway)")
    add("--namespace", required=True, help="of the route, both Services and their metrics")
    add("--prometheus", type=_address, metavar="URL", help="its address, without /api")
    add("--stable", default="distrinews", metavar="SERVICE", help="what serves now (distrinews)")
    add("--canary", default="distrinews-canary", metavar="SERVICE", help="what may replace it")
    add(
        "--steps",
        type=_steps,
        default=[5, 25, 50, 100],
        metavar="N,N",
        help="percent (5,25,50,100)",
    )
    add("--step_s", type=above_zero, default=600.0, metavar="N", help="seconds per step (600)")
    add("--every_s", type=above_zero, default=30.0, metavar="N", help="seconds between checks (30)")
    add(
        "--least_requests",
        type=positive,
        default=200,
        metavar="N",
        help="with fewer, nothing is decided (200)",
    )
    add(
        "--most_failed",
        type=above_zero,
        default=1.0,
        metavar="N",
        help="its share of 5xx answers may be this many percentage points above theirs (1)",
    )
    add(
        "--most_slower",
        type=above_zero,
        default=1.5,
        metavar="N",
        help="its p99 may be up to this many times theirs (1.5)",
    )
    add("--path", default="/predict", help="the route of the server whose p99 counts (/predict)")
    add("--weight", type=_percent, metavar="N", help="only set the canary's percentage, and exit")
    options = parser.parse_args()
    if options.prometheus is None and options.weight is None:
        parser.error("--prometheus is needed, because its metrics decide")
    return options


def _address(text: str) -> str:
    if urlsplit(text).scheme not in ("http", "https") or not urlsplit(text).hostname:
        raise argparse.ArgumentTypeError(
            f"{text}: must be an address such as http://localhost:9090"
        )
    return text.rstrip("/")


def _percent(text: str) -> int:
    if not text.isdecimal() or int(text) > 100:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number from 0 to 100")
    return int(text)


def _steps(text: str) -> list[int]:
    steps = [_percent(part) for part in text.split(",")]
    if steps != sorted(set(steps)) or steps[0] == 0 or steps[-1] != 100:
        raise argparse.ArgumentTypeError(f"{text}: must rise, and end with 100")
    return steps


if __name__ == "__main__":
    run_command(main)
