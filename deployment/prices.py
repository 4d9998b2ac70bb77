"""What machines cost per hour to hire, as their lists said on the day that stands beside them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PriceList:
    """Where prices were read, and as of when."""

    name: str
    address: str
    date: str


HUB_JOBS = PriceList(
    "Hugging Face Jobs", "https://huggingface.co/docs/hub/jobs-pricing", "2026-08-22"
)
EC2 = PriceList(
    "Amazon EC2 on demand, US East, quoted by",
    "https://www.doit.com/blog/aws-ec2-pricing",
    "2026-11-23",
)


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
