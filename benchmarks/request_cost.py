"""What does a request cost the server besides the model's own work, and what do two workers gain?

The model is replaced by an engine that costs nothing: what is left is HTTP, JSON, tokenizing,
batching, metrics and the log. The client is wrk, which has to be installed (apt-get install wrk).
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks import harness
from benchmarks.harness import Goal
from benchmarks.serving.client import Load
from benchmarks.serving.running import Running, started
from benchmarks.serving.servers import Server
from benchmarks.serving.workload import read_workload
from common.errors import UserError

MODULE = "benchmarks.request_cost"
PACKAGES = ("fastapi", "uvicorn", "uvloop", "httptools", "tokenizers", "numpy")
CLIENTS = 32
STEADY_SHARE = 0.7
Series = dict[str, list[float]]
WORKERS = (1, 2)
INTRODUCTION = """
The engine answers immediately, so this is the cost of HTTP, JSON, tokenizing, batching, metrics and the log line.
*requests/s*: single texts of AG News, sent over {clients} connections by wrk, which shares the cores with the server.
*CPU ms/request*: processor time of all the server's processes. *p99 at 70%*: latency when requests arrive evenly at 70%
of that rate, each on its own connection. Figures are medians over {rounds} rounds, with the smallest and the largest.
"""
# wrk sends the bodies of a file in turn.
_SCRIPT = """
local bodies = {}
for line in io.lines("FILE") do bodies[#bodies + 1] = line end
local next_body = 0
wrk.method, wrk.headers["Content-Type"] = "POST", "application/json"
request = function()
  next_body = next_body % #bodies + 1
  return wrk.format(nil, "/predict", nil, bodies[next_body])
end
"""


def main() -> None:
    parser = harness.Parser(MODULE, __doc__, page="request_cost.md", rounds=5)
    parser.add_argument(
        "--model", type=Path, required=True, help="a model folder, for its tokenizer"
    )
    parser.add_argument(
        "--texts", default="data/ag_news", help="texts to send (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=harness.seconds, default=5, help="of each load (default: %(default)s)"
    )
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        raise UserError("wrk is not installed: apt-get install wrk", code="benchmark-failed")
    page = render(measure_rounds(options), options.rounds)
    harness.write_page(options.output, page)


def measure_rounds(options: Namespace) -> dict[str, Series]:
    """By the number of workers, each figure's value in every round."""
    texts = read_workload(options.model, options.texts).texts
    cases = {f"{number} worker{'s' * (number > 1)}": number for number in WORKERS}
    with tempfile.TemporaryDirectory() as folder:
        bodies, script = Path(folder, "bodies"), Path(folder, "post.lua")
        server = _server(1)
        server.write_bodies(bodies, texts, 1)
        script.write_text(_SCRIPT.replace("FILE", str(bodies)))

        def measure(workers: int, number: int) -> dict[str, float]:
            with started(_server(workers), options.model, sys.executable) as running:
                # A second that counts nowhere: the first requests open connections and let buffers
                # grow.
                _wrk(running, script, 1)
                found = _wrk(running, script, options.seconds)
                rate = STEADY_SHARE * found["rate"]
                steady = running.apply(
                    Load(str(bodies), running.port, "/predict", 1, options.seconds, rate=rate)
                )
                # wrk is a closed loop, in which a slow answer delays the next request and hides the
                # wait. The tail comes from our open loop, in which it does not.
                return found | {"p99_ms": steady["latency"]["200"]["p99"] * 1e3}

        rounds = list(
            harness.run_rounds(
                cases, options.rounds, measure, lambda found: f"{found['rate']:,.0f} requests/s"
            )
        )
    return {
        name: {key: [one[name][key] for one in rounds] for key in rounds[0][name]} for name in cases
    }


def render(found: dict[str, Series], num_rounds: int) -> str:
    one, two = found.values()
    gain = harness.median_ratio(two["rate"], one["rate"])
    cpu, p99, shape = median(one["cpu_ms"]), median(one["p99_ms"]), "{:.2f}"
    goals = [
        Goal("CPU ms per request, 1 worker", cpu, "at most", 0.40, shape),
        Goal("p99 at 70%, 1 worker, ms", p99, "at most", 20, shape, limit_shape="{:.0f}"),
        Goal("2 workers ÷ 1 worker, requests/s", gain, "at least", 1.7, shape),
    ]
    columns: dict[str, Callable[[str], str]] = {
        "": str,
        "requests/s": lambda name: harness.median_and_spread(found[name]["rate"], 0),
        "CPU ms/request": lambda name: harness.median_and_spread(found[name]["cpu_ms"], 3),
        "p99 at 70%, ms": lambda name: harness.median_and_spread(found[name]["p99_ms"]),
    }
    text = INTRODUCTION.format(clients=CLIENTS, rounds=num_rounds)
    page = harness.introduction(MODULE, "What a request costs", text)
    page += harness.fact_list(harness.measurement_facts(MODULE, PACKAGES)) + "\n"
    return f"{page}{harness.goals_table(goals)}\n{harness.table(columns, found)}"


def _server(workers: int) -> Server:
    command = ("-m", "benchmarks.serving.free_engine", "--host", "127.0.0.1", "--port", "{port}")
    return Server("ours", command, "", "", python="own", environment={"WORKERS": str(workers)})


def _wrk(running: Running, script: Path, seconds: float) -> dict[str, float]:
    """Requests per second, and the server's processor milliseconds for each.

    Raises:
        UserError: a request was not answered with 200.
    """
    before = running.tree.cpu_seconds()
    # One thread, because wrk takes its time from the server's cores.
    flags = ["-t1", f"-c{CLIENTS}", f"-d{math.ceil(seconds)}s", "-s", script]
    command = ["wrk", *flags, f"http://127.0.0.1:{running.port}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = running.tree.cpu_seconds() - before
    # Refusals are cheap, and would make the server look fast.
    if "Non-2xx" in said or "Socket errors" in said:
        raise UserError(f"wrk: {' '.join(said.split())}", code="benchmark-failed")
    count = re.search(r"(\d+) requests in", said)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", said)
    return {"rate": float(rate[1]), "cpu_ms": used / int(count[1]) * 1e3}


if __name__ == "__main__":
    harness.run_benchmark(main)
