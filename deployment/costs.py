"""What a billion texts cost to classify, and how long they take: python -m deployment.costs
[--texts 1e9].

Every figure is simulated: a measured rate per core times the cores of machines that nobody has
tried, at list prices.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # started by path: the imports below need the repository
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.errors import OneLineParser, UserError, above_zero, positive, run_command
from deployment.prices import EC2, HUB_FLAVORS, Machine

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


_HIRED = (
    # The rates were measured on processors, and say nothing about GPUs.
    *(machine for machine in HUB_FLAVORS.values() if not machine.gpus),
    Machine("m7i.large", 2, "", 0.1008, EC2),
)


@dataclass(frozen=True, slots=True)
class Rate:
    """Texts per second that were measured on some cores, kept busy; ``source`` says where."""

    what: str
    texts_per_second: float
    cores: int
    source: str

    @property
    def per_core(self) -> float:
        return self.texts_per_second / self.cores


def measured_rates() -> list[Rate]:
    """What the benchmarks have measured with the default engine: bulk scoring, or serving if that was not measured."""
    bulk, served = BENCHMARKS / "bulk_scoring.json", BENCHMARKS / "serving.json"
    # Bulk scoring is what a billion texts would be classified with; serving pays for HTTP as well.
    if bulk.exists() and (speed := json.loads(bulk.read_text(encoding="utf-8")).get("speed")):
        return [_scored(case, speed) for case in speed["cases"]]
    return [_served(section) for section in json.loads(served.read_text(encoding="utf-8")).values()]


def _scored(case: dict[str, Any], speed: dict[str, Any]) -> Rate:
    """Of one model in ``benchmarks.bulk_scoring``."""
    what = (
        f"{case['model']}, {case['engine'].partition(' (')[0]}, texts of ag_news, from Parquet to "
        "Parquet"
    )
    rate = median(each["scoring"]["rows_per_second"] for each in case["rounds"])
    return Rate(what, rate, speed["threads"], _source("bulk_scoring", speed["facts"]))


def _served(section: dict[str, Any]) -> Rate:
    """Of one instruction set in ``benchmarks.serving_load``."""
    what = (
        f"{section['model']}, {section['instruction_set']}, texts of "
        f"{section['workload']['dataset']}, over HTTP"
    )
    rate = median(each["ours"]["64 clients"]["texts_per_second"] for each in section["rounds"])
    # The page's facts are prose for people; the number of cores is the one that the load ran on.
    cores = int(re.findall(r"(\d+) cores", section["facts"]["Machine"])[0])
    return Rate(what, rate, cores, _source("serving", section["facts"]))


def _source(page: str, facts: dict[str, str]) -> str:
    return f"benchmarks/{page}.md, {facts['Measured']}, {facts['Machine'].partition(',')[0]}"


def main() -> None:
    options = _parse()
    rates = [options.rate] if options.rate else measured_rates()
    count = f"{options.machines} machines" if options.machines > 1 else "one machine"
    print(
        f"{options.texts:,} texts on {count} of each kind. What is marked as simulated was not "
        "measured but computed:"
    )
    print(
        "every hired core is assumed to be as fast as a measured one, texts as long as the "
        "measured ones, and speed to"
    )
    print("grow with the number of cores. Only the machines' hours cost anything.")
    for rate in rates:
        print(
            f"\n{rate.what}: {rate.texts_per_second:,.0f} texts/s measured on {rate.cores} cores "
            f"({rate.source})"
        )
        print(_table(rate, options.hire or _HIRED, options.texts, options.machines))
    print("\nPrices per hour")
    lists = dict.fromkeys(machine.prices for machine in options.hire or _HIRED)
    for prices in lists:
        print(
            f"  {prices.name}: {prices.address}, {prices.date}" if prices else "  your own: --hire"
        )


def simulate(
    rate: Rate, machine: Machine, texts: int, machines: int = 1
) -> tuple[float, float, float]:
    """Texts per second, hours and dollars of so many machines of one kind, all kept busy."""
    # More machines change the hours and not the dollars: each is paid for a shorter time.
    texts_per_second = rate.per_core * machine.cores * machines
    hours = texts / texts_per_second / 3600
    return texts_per_second, hours, hours * machines * machine.dollars_per_hour


def _table(rate: Rate, hired: Sequence[Machine], texts: int, machines: int) -> str:
    rows = [
        ("machine", "cores", "$/hour", "texts/s (simulated)", "hours (simulated)", "$ (simulated)")
    ]
    for machine in hired:
        texts_per_second, hours, dollars = simulate(rate, machine, texts, machines)
        # Lists quote two or four digits, and neither should be rounded.
        price = f"{machine.dollars_per_hour:.4f}".removesuffix("00")
        figures = (f"{texts_per_second:,.0f}", f"{hours:,.1f}", f"{dollars:,.2f}")
        rows.append((machine.name, str(machine.cores), price, *figures))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [
                f"  {name:<{widths[0]}}",
                *(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)),
            ]
        )
        for name, *cells in rows
    )


def _parse() -> argparse.Namespace:
    parser = OneLineParser(prog="python -m deployment.costs", description=__doc__)
    add = parser.add_argument
    add("--texts", type=_count, default=10**9, metavar="N", help="texts to classify (default: 1e9)")
    add(
        "--machines",
        type=positive,
        default=1,
        metavar="N",
        help="machines of each kind (default: 1)",
    )
    add(
        "--texts_per_second",
        type=above_zero,
        metavar="N",
        help="a rate that you measured yourself, on --cores cores (default: the rates of our "
        "benchmarks)",
    )
    add(
        "--cores",
        type=positive,
        metavar="N",
        help="the cores that --texts_per_second was measured on",
    )
    add(
        "--hire",
        type=_machine,
        action="append",
        metavar="NAME:CORES:DOLLARS",
        help="a machine at a price per hour that you know, such as mine:64:2.5; may be repeated "
        "(default: our list)",
    )
    options = parser.parse_args()
    if (options.texts_per_second is None) != (options.cores is None):
        raise UserError("--texts_per_second and --cores: a rate needs both", code="usage")
    options.rate = None
    if options.cores:
        options.rate = Rate(
            "your rate", options.texts_per_second, options.cores, "--texts_per_second, --cores"
        )
    return options


def _count(text: str) -> int:
    if not (count := above_zero(text)).is_integer():
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, such as 1e9")
    return int(count)


def _machine(text: str) -> Machine:
    # From the right, because a name may contain colons. The blanks stand for what is missing.
    name, cores, dollars = [*text.rsplit(":", 2), "", ""][:3]
    if not (name and cores and dollars):
        raise argparse.ArgumentTypeError(f"{text}: must be NAME:CORES:DOLLARS, such as mine:64:2.5")
    return Machine(name, positive(cores), "", above_zero(dollars), None)


if __name__ == "__main__":
    run_command(main)
