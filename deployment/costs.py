"""What a billion texts cost to classify, and how long they take: python -m deployment.costs [--texts 1e9].

Every figure is simulated: a measured rate per core times the cores of machines that nobody has tried, at list prices.
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

from common.errors import OneLineParser, UserError, positive, run_command

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@dataclass(frozen=True, slots=True)
class PriceList:
    """Where prices were read, and as of when."""

    name: str
    address: str
    date: str


HUB_JOBS = PriceList("Hugging Face Jobs", "https://huggingface.co/docs/hub/jobs-pricing", "2026-08-22")
EC2 = PriceList("Amazon EC2, on demand, US East", "https://www.doit.com/blog/aws-ec2-pricing", "2026-11-23")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that can be hired: virtual cores, GPUs in words ("" without), and dollars per hour."""

    name: str
    cores: int
    gpus: str
    dollars_per_hour: float
    prices: PriceList | None = HUB_JOBS

    def __str__(self) -> str:
        return f"{self.name} ({self.cores} virtual cores{', ' + self.gpus if self.gpus else ''})"


# Under the names that `hf jobs hardware` and --flavor know.
HUB_FLAVORS = {
    machine.name: machine
    for machine in (
        Machine("cpu-basic", 2, "", 0.01),
        Machine("cpu-upgrade", 8, "", 0.03),
        Machine("cpu-xl", 16, "", 1.00),
        Machine("cpu-performance", 32, "", 1.90),
        Machine("t4-small", 4, "1 x T4", 0.40),
        Machine("t4-medium", 8, "1 x T4", 0.60),
        Machine("l4x1", 8, "1 x L4", 0.80),
        Machine("l4x4", 48, "4 x L4", 3.80),
        Machine("l40sx1", 8, "1 x L40S", 1.80),
        Machine("l40sx4", 48, "4 x L40S", 8.30),
        Machine("l40sx8", 192, "8 x L40S", 23.50),
        Machine("a10g-small", 4, "1 x A10G", 1.00),
        Machine("a10g-large", 12, "1 x A10G", 1.50),
        Machine("a10g-largex2", 24, "2 x A10G", 3.00),
        Machine("a10g-largex4", 48, "4 x A10G", 5.00),
        Machine("a100-large", 12, "1 x A100", 2.50),
        Machine("a100x4", 48, "4 x A100", 10.00),
        Machine("a100x8", 96, "8 x A100", 20.00),
        Machine("h200", 23, "1 x H200", 5.00),
        Machine("h200x2", 46, "2 x H200", 10.00),
        Machine("h200x4", 92, "4 x H200", 20.00),
        Machine("h200x8", 184, "8 x H200", 40.00),
        Machine("rtx-pro-6000", 23, "1 x RTX PRO 6000", 2.75),
        Machine("rtx-pro-6000x2", 46, "2 x RTX PRO 6000", 5.50),
        Machine("rtx-pro-6000x4", 92, "4 x RTX PRO 6000", 11.00),
        Machine("rtx-pro-6000x8", 184, "8 x RTX PRO 6000", 22.00),
    )
}
_HIRED = (
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
    """What the benchmarks of serving have measured with the default engine, for each instruction set."""
    page = BENCHMARKS / "serving.json"
    return [_served(section) for section in json.loads(page.read_text(encoding="utf-8")).values()]


def _served(section: dict[str, Any]) -> Rate:
    facts, tokens = section["facts"], section["workload"]["tokens_mean"]
    return Rate(
        f"{section['model']}, {section['instruction_set']}, {tokens:.0f} tokens per text, over HTTP",
        median(each["ours"]["64 clients"]["texts_per_second"] for each in section["rounds"]),
        int(re.findall(r"(\d+) cores", facts["Machine"])[0]),
        f"benchmarks/serving.md, {facts['Measured']}, {facts['Machine'].partition(',')[0]}",
    )


def main() -> None:
    options = _parse()
    rates = [options.rate] if options.rate else measured_rates()
    count = f"{options.machines} machines" if options.machines > 1 else "one machine"
    print(f"{options.texts:,} texts on {count} of each kind. What is marked as simulated was computed, not tried:")
    print(
        "every hired core is taken to be as fast as a measured one, texts to be as long as the measured ones, and speed"
    )
    print("to grow with the cores; only the hours of the machines cost anything.")
    for rate in rates:
        print(f"\n{rate.what}: {rate.texts_per_second:,.0f} texts/s measured on {rate.cores} cores ({rate.source})")
        print(_table(rate, options.hire or _HIRED, options.texts, options.machines))
    print("\nPrices per hour")
    lists = dict.fromkeys(machine.prices for machine in options.hire or _HIRED)
    for prices in lists:
        print(f"  {prices.name}: {prices.address}, {prices.date}" if prices else "  your own: --hire")


def simulate(rate: Rate, machine: Machine, texts: int, machines: int = 1) -> tuple[float, float, float]:
    """Texts per second, hours and dollars of so many machines of one kind, all kept busy."""
    texts_per_second = rate.per_core * machine.cores * machines
    hours = texts / texts_per_second / 3600
    return texts_per_second, hours, hours * machines * machine.dollars_per_hour


def _table(rate: Rate, hired: Sequence[Machine], texts: int, machines: int) -> str:
    rows = [("machine", "cores", "$/hour", "texts/s (simulated)", "hours (simulated)", "$ (simulated)")]
    for machine in hired:
        texts_per_second, hours, dollars = simulate(rate, machine, texts, machines)
        price = f"{machine.dollars_per_hour:.4f}".removesuffix("00")
        figures = (f"{texts_per_second:,.0f}", f"{hours:,.1f}", f"{dollars:,.2f}")
        rows.append((machine.name, str(machine.cores), price, *figures))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [f"  {name:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))]
        )
        for name, *cells in rows
    )


def _parse() -> argparse.Namespace:
    parser = OneLineParser(prog="python -m deployment.costs", description=__doc__)
    parser.add_argument("--texts", type=_count, default=10**9, metavar="N", help="texts to classify (default: 1e9)")
    parser.add_argument("--machines", type=positive, default=1, metavar="N", help="machines of each kind (default: 1)")
    parser.add_argument(
        "--texts_per_second",
        type=above_zero,
        metavar="N",
        help="a rate that you have measured, on as many cores as --cores says (default: the rates of our benchmarks)",
    )
    parser.add_argument("--cores", type=positive, metavar="N", help="the cores that --texts_per_second was measured on")
    parser.add_argument(
        "--hire",
        type=_machine,
        action="append",
        metavar="NAME:CORES:DOLLARS",
        help="a machine at a price per hour that you know, such as mine:64:2.5; may be repeated (default: our list)",
    )
    options = parser.parse_args()
    if (options.texts_per_second is None) != (options.cores is None):
        raise UserError("--texts_per_second and --cores: a rate needs both", code="usage")
    options.rate = None
    if options.cores:
        options.rate = Rate("your rate", options.texts_per_second, options.cores, "--texts_per_second, --cores")
    return options


def _count(text: str) -> int:
    if not (count := above_zero(text)).is_integer():
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, such as 1e9")
    return int(count)


def above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number greater than 0")
    return number


def _machine(text: str) -> Machine:
    name, cores, dollars = [*text.rsplit(":", 2), "", ""][:3]
    if not (name and cores and dollars):
        raise argparse.ArgumentTypeError(f"{text}: must be NAME:CORES:DOLLARS, such as mine:64:2.5")
    return Machine(name, positive(cores), "", above_zero(dollars), None)


if __name__ == "__main__":
    run_command(main)
