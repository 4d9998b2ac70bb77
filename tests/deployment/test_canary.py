"""The canary's command as a process: a stand-in for kubectl on its PATH, and one for Prometheus that it asks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from deployment.canary import Route, models_query, queries
from tests.deployment.documented import REPOSITORY
from tests.deployment.manifests import only
from tests.deployment.promql import shown_by_all
from tests.http_servers import JsonHandler, served_answers

STABLE, CANARY = "distrinews", "distrinews-canary"
# Keeps one HTTPRoute as a file, knows the two JSON patches in use, and refuses what the file `refusals` counts down.
KUBECTL = """
import json, pathlib, sys
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:4]) + "\\n")
route = json.loads((here / "route.json").read_text())
if sys.argv[1] != "--namespace=news" or sys.argv[4] != route["metadata"]["name"]:
    sys.exit(f'Error from server (NotFound): httproutes "{sys.argv[4]}" not found')
if sys.argv[2] == "get":
    print(json.dumps(route))
    sys.exit()
left = int((here / "refusals").read_text())
(here / "refusals").write_text(str(max(left - 1, 0)))
if left:
    sys.exit("Error from server (Timeout): try again")
assert sys.argv[5] == "--type=json", sys.argv
for change in json.loads(sys.argv[6].removeprefix("--patch=")):
    *path, last = change["path"].strip("/").split("/")
    place = route
    for part in path:
        place = place[int(part) if part.isdecimal() else part]
    if change["op"] == "test" and place[last] != change["value"]:
        sys.exit("the server rejected our request: test failed")
    place[last] = change["value"]
(here / "route.json").write_text(json.dumps(route))
weights = [ref["weight"] for ref in route["spec"]["rules"][0]["backendRefs"]]
with (here / "weights").open("a") as file:
    file.write(f"{weights}\\n")
"""


@dataclass
class World:
    """A cluster with one route, and what Prometheus tells of its two Services."""

    folder: Path
    address: str = ""
    # requests, failed, p99_s and ready of each Service
    told: dict[str, dict[str, float]] = field(default_factory=dict)
    # the labels of the model of each Service
    models: dict[str, dict[str, str]] = field(default_factory=dict)
    answers: Callable[[], bool] = lambda: True
    asked: list[str] = field(default_factory=list)

    def route(self) -> dict[str, Any]:
        return json.loads((self.folder / "route.json").read_text())

    def canary_weights(self) -> list[int]:
        """Each weight that the canary was given, in this order; both always make up 100."""
        pairs = [json.loads(line) for line in (self.folder / "weights").read_text().splitlines()]
        assert {sum(pair) for pair in pairs} <= {100}
        return [pair[1] for pair in pairs]

    def start(self, *flags: str) -> subprocess.Popen[str]:
        fast = ("--step_s", "0.2", "--every_s", "0.05")
        command = [sys.executable, "deployment/canary.py", "distrinews", "--namespace=news", *fast, *flags]
        command += [] if "--prometheus" in flags else ["--prometheus", self.address]
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "NO_PROXY": "127.0.0.1"}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, env=env
        )

    def run(self, *flags: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*flags)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    good = {"requests": 1000.0, "failed": 2.0, "p99_s": 0.2, "ready": 2.0}
    models = {STABLE: {"revision": "old"}, CANARY: {"revision": "new", "replaces": "old"}}
    world = World(tmp_path, told={STABLE: dict(good), CANARY: dict(good)}, models=models)
    (tmp_path / "kubectl").write_text(f"#!{sys.executable}\n{KUBECTL}")
    (tmp_path / "kubectl").chmod(0o755)
    (tmp_path / "route.json").write_text(json.dumps(only("gateway", "HTTPRoute")))
    (tmp_path / "refusals").write_text("0")
    (tmp_path / "weights").touch()

    def prometheus(request: JsonHandler) -> dict[str, Any] | None:
        (query,) = parse_qs(urlsplit(request.path).query)["query"]
        world.asked.append(query)
        if not world.answers():
            return request.send(503, b"")
        kind = next(kind for kind, start in KINDS.items() if re.match(start, query))
        result = [
            {"metric": {"service": service}, "value": [0, str(values[kind])]}
            for service, values in world.told.items()
            if kind in values
        ]
        if kind == "models":
            result = [{"metric": {"service": one, **world.models[one]}, "value": [0, "1"]} for one in world.models]
        return {"status": "success", "data": {"resultType": "vector", "result": result}}

    with served_answers(prometheus) as world.address:
        yield world


KINDS = {
    "models": r"count by .*distrinews_model_info",
    "ready": r"sum by \(service\) \(distrinews_model_ready",
    "failed": r".*status=~\"5",
    "requests": r"sum by \(service\) \(increase",
    "p99_s": "histogram_quantile",
}


def error_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_good_canary_gets_all_requests_step_by_step(world: World) -> None:
    done = world.run()

    assert done.returncode == 0, done.stderr
    assert world.canary_weights() == [0, 5, 25, 50, 100]
    assert "Promoted." in done.stdout


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"failed": 40.0}, "it fails 4.00% of its requests, the stable servers 0.20%"),
        ({"p99_s": 0.4}, "its p99 is 0.400 s, that of the stable servers 0.200 s"),
        ({"ready": 0.0, "requests": 0.0}, "none of its servers is ready"),
    ],
    ids=["errors", "slow", "gone"],
)
def test_a_canary_that_turns_bad_is_rolled_back(world: World, told: dict[str, float], reason: str) -> None:
    def turn_bad_at_a_quarter() -> bool:
        if world.canary_weights()[-1:] == [25]:
            world.told[CANARY] |= told
        return True

    world.answers = turn_bad_at_a_quarter

    line = error_line(world.run(), 1)

    assert line == f"error: {CANARY}: rolled back, because {reason} [canary-failed]\n"
    assert world.canary_weights() == [0, 5, 25, 0]


def test_a_canary_is_not_blamed_for_what_the_stable_servers_do_too(world: World) -> None:
    for values in world.told.values():
        values |= {"failed": 100.0, "p99_s": 2.0}

    assert world.run("--steps", "50,100").returncode == 0


def test_a_fast_canary_may_be_slower_than_a_faster_server(world: World) -> None:
    world.told[STABLE]["p99_s"], world.told[CANARY]["p99_s"] = 0.01, 0.04

    assert world.run("--steps", "100").returncode == 0


def test_without_stable_servers_requests_the_canary_is_measured_by_what_they_did_before(world: World) -> None:
    def nothing_left_for_stable() -> bool:
        if world.canary_weights()[-1:] == [100]:
            world.told[STABLE] = {"ready": 2.0, "p99_s": float("nan")}
            world.told[CANARY]["p99_s"] = 0.35
        return True

    world.answers = nothing_left_for_stable

    assert "that of the stable servers 0.200 s" in error_line(world.run("--steps", "50,100"), 1)


def test_too_few_requests_to_tell_are_no_promotion(world: World) -> None:
    world.told[CANARY]["requests"] = 7.0

    line = error_line(world.run(), 1)

    assert "7 requests in 1 s are too few to tell (--least_requests 200)" in line
    assert world.canary_weights() == [0, 5, 0]


def test_without_metrics_the_canary_is_rolled_back(world: World) -> None:
    world.answers = lambda: world.canary_weights()[-1:] != [5]

    assert "Prometheus did not answer 5 times in a row" in error_line(world.run(), 1)
    assert world.canary_weights() == [0, 5, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_whoever_stops_the_command_rolls_the_canary_back(world: World, number: signal.Signals) -> None:
    at_five = threading.Event()

    def watch() -> bool:
        if world.canary_weights()[-1:] == [5]:
            at_five.set()
        return True

    world.answers = watch
    process = world.start("--step_s", "600")
    assert at_five.wait(60)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (1, f"error: {CANARY}: rolled back, because stopped [canary-failed]\n")
    assert world.canary_weights() == [0, 5, 0]


def test_a_rollback_that_is_refused_is_tried_again(world: World) -> None:
    def refuse_at_five() -> bool:
        if world.canary_weights()[-1:] == [5] and world.told[CANARY]["failed"] < 100:
            world.told[CANARY]["failed"] = 500.0
            (world.folder / "refusals").write_text("1")
        return True

    world.answers = refuse_at_five

    done = world.run()

    assert "rolled back, because it fails 50.00%" in error_line(done, 1)
    assert "Error from server (Timeout): try again; next attempt in 2 s" in done.stdout
    assert world.canary_weights() == [0, 5, 0]


def test_every_rule_with_both_backends_is_changed_and_no_other(world: World) -> None:
    route = world.route()
    (rule,) = route["spec"]["rules"]
    pages = {"backendRefs": [{"name": "pages", "port": 80}]}
    unweighted = {"backendRefs": [{"name": CANARY, "port": 80}, {"name": STABLE, "port": 80}]}
    route["spec"]["rules"] = [rule, pages, unweighted]
    (world.folder / "route.json").write_text(json.dumps(route))

    assert world.run("--weight", "30").returncode == 0

    rules = world.route()["spec"]["rules"]
    assert [[ref.get("weight") for ref in rule["backendRefs"]] for rule in rules] == [[70, 30], [None], [30, 70]]
    assert world.asked == []


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--canary", "other"), "no rule has both backends, distrinews and other"),
        (("--namespace=old",), 'httproutes "distrinews" not found'),
        (("--steps", "50,20,100"), "--steps: 50,20,100: must rise, and end with 100"),
        (("--steps", "5,25"), "must rise, and end with 100"),
        (("--weight", "101"), "must be a whole number from 0 to 100"),
        (("--prometheus", "localhost:9090"), "must be an address"),
        (("--prometheus", "http://127.0.0.1:9"), "no answer"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line_and_changes_nothing(
    world: World, flags: tuple[str, ...], word: str
) -> None:
    world.told["other"] = world.told[CANARY]
    before = world.route()

    assert word in error_line(world.run(*flags), 2)
    assert world.route() == before


def test_a_canary_that_is_not_ready_gets_no_request(world: World) -> None:
    world.told[CANARY]["ready"] = 0.0

    assert "knows of no server of it that is ready" in error_line(world.run(), 2)
    assert world.canary_weights() == []


@pytest.mark.parametrize(
    ("canary", "is_allowed"),
    [
        ({"revision": "new", "replaces": "old"}, True),
        ({"revision": "old"}, True),  # new code, and the same model
        ({"revision": "new"}, False),
        ({"revision": "new", "replaces": "older"}, False),
        ({"revision": "old", "model_name": "spam"}, False),
    ],
)
def test_a_canary_whose_model_no_verdict_lets_replace_the_stable_one_gets_no_request(
    world: World, canary: dict[str, str], is_allowed: bool
) -> None:
    world.models[CANARY] = canary

    done = world.run()

    if is_allowed:
        assert done.returncode == 0, done.stderr
    else:
        assert "no verdict lets replace" in error_line(done, 2)
        assert world.canary_weights() == []


def test_a_rule_with_a_third_backend_is_refused(world: World) -> None:
    route = world.route()
    route["spec"]["rules"][0]["backendRefs"].append({"name": "third", "port": 80})
    (world.folder / "route.json").write_text(json.dumps(route))

    assert "has backends other than" in error_line(world.run(), 2)


ROUTE = Route("distrinews", "news", STABLE, CANARY)
QUERIES = queries(ROUTE, "/predict", 60)


def test_the_questions_are_about_metrics_and_labels_that_the_server_has(model_folder: Path) -> None:
    shown = shown_by_all(model_folder)
    added_by_the_operator = {"namespace", "service"}
    for query in (*QUERIES.values(), models_query(ROUTE)):
        name = re.search(r"distrinews_\w+", query.partition("{")[0])[0]
        assert set(re.findall(r"(\w+)=~?\"", query)) <= shown[name] | added_by_the_operator


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool: apt-get install prometheus")
def test_prometheus_answers_the_questions_for_each_service(tmp_path: Path) -> None:
    series, at = [], "5m"
    for service, failing in ((STABLE, 1), (CANARY, 3)):
        of = f'namespace="news", service="{service}", pod="a"'
        requests = f'distrinews_requests_total{{{of}, method="POST", route="/predict"'
        series += [
            {"series": f'{requests}, status="200"}}', "values": f"0+{10 - failing}x20"},
            {"series": f'{requests}, status="503"}}', "values": f"0+{failing}x20"},
            {"series": f'{requests}, status="200"}}'.replace('"news"', '"staging"'), "values": "0+99x20"},
            {"series": f"distrinews_model_ready{{{of}}}", "values": "1x20"},
        ]
        series += [
            {"series": f'distrinews_request_seconds_bucket{{{of}, route="/predict", le="{le}"}}', "values": "0+10x20"}
            for le in ("1", "+Inf")
        ]
    wanted = {
        "ready": (1, 1),
        "requests": (40, 40),
        "failed": (4, 12),
        "p99_s": (0.99, 0.99),
    }
    tests = [
        {
            "expr": f"round({QUERIES[name]}, 0.001)",
            "eval_time": at,
            "exp_samples": [
                {"labels": f'{{service="{service}"}}', "value": value}
                for service, value in zip((STABLE, CANARY), values, strict=True)
            ],
        }
        for name, values in wanted.items()
    ]
    file = {
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": series, "promql_expr_test": tests}],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(file))

    done = subprocess.run(["promtool", "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
