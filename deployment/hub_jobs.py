"""Classify rows on a machine of Hugging Face Jobs, at a price that is shown beforehand.

python deployment/hub_jobs.py hf://datasets/ACCOUNT/NAME/FILE hf://buckets/ACCOUNT/NAME/FILE --model
ACCOUNT/NAME --image IMAGE

It prints the command, the machine and its price, and starts nothing; with --yes it starts what it
has printed. Each input becomes a Job of its own. The token comes from HF_TOKEN or the hub's login
(hf auth login).
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# A script finds only its own folder by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from huggingface_hub import HfApi, Volume

from common.errors import OneLineParser, UserError, above_zero, run_command
from deployment.prices import HUB_FLAVORS, HUB_JOBS
from training.publishing.hub_upload import HUB_ERRORS, explain, sign_in

_ADDRESS = re.compile(
    r"hf://(?P<kind>datasets|buckets)/(?P<name>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[^/]+))?(?:/(?P<path>.+?))?/?"
)
_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_CREDIT = (
    "Jobs are paid from a credit balance: add to it at https://huggingface.co/settings/billing"
)
_RIGHT = (
    "the token may not start Jobs for this account; give it that right at "
    "https://huggingface.co/settings/tokens"
)


@dataclass(frozen=True, slots=True)
class Place:
    """A file or folder of the hub, and where the Job sees it."""

    volume: Volume
    path: str  # in the repository or bucket; "" for all of it

    @property
    def mounted(self) -> str:
        return str(PurePosixPath(self.volume.mount_path, self.path))


@dataclass(frozen=True, slots=True)
class Job:
    """What runs, and the repositories and buckets that it sees as folders."""

    command: list[str]
    volumes: list[Volume]


def main() -> None:
    options, flags = _parse()
    pairs = _jobs(options.addresses)
    model = Volume(type="model", source=options.model, mount_path="/model")
    score, flags = ["python", "-m", "inference.score"], ["--model", model.mount_path, *flags]
    jobs = [
        Job([*score, source.mounted, target.mounted, *flags], [source.volume, target.volume, model])
        for source, target in pairs
    ]
    # Before the sign-in, so that anybody can see what a command would do and cost.
    price = _announce(jobs, options)
    if not options.yes:
        print("Nothing was started. The same command with --yes starts it.")
        return
    api, account = sign_in()
    _check_price(api, options.flavor, price)
    for job in jobs:
        # A Job that is sent twice is paid twice, so nothing is sent again without a look.
        check = "check with hf jobs ps whether it has started before you start it again"
        with _job_errors(shlex.join(job.command), check):
            started = api.run_job(
                image=options.image,
                command=job.command,
                flavor=options.flavor,
                timeout=options.timeout,
                labels={"distrinews": "score"},
                volumes=job.volumes,
                namespace=options.namespace or account,
            )
        print(
            f"Started {started.url}\n    hf jobs logs --follow {started.id}\n"
            f"    hf jobs cancel {started.id}",
            flush=True,
        )


def _announce(jobs: list[Job], options: argparse.Namespace) -> float:
    """Print the Jobs, their machine and what they cost at most; returns the dollars per hour."""
    machine = HUB_FLAVORS[options.flavor]
    price, agreed = options.dollars_per_hour, "--dollars_per_hour"
    if price is None:
        price, agreed = machine.dollars_per_hour, f"{HUB_JOBS.address}, {HUB_JOBS.date}"
    for job in jobs:
        print(shlex.join(job.command))
        for volume in job.volumes:
            print(f"    {volume.mount_path:<8}{volume.type} {volume.source}")
    # To the next cent; the rounding inside keeps 3.0000000000000004 from becoming four.
    most = math.ceil(round(len(jobs) * options.timeout / 3600 * price * 100, 6)) / 100
    count = "1 Job" if len(jobs) == 1 else f"{len(jobs)} Jobs, each"
    ends = f"after {_in_words(options.timeout)} the hub ends what still runs (--timeout)"
    print(f"{count} on {machine}, in {options.image}")
    print(f"Price: ${price:.2f} per hour and Job ({agreed}).")
    print(f"At most ${most:.2f}: {ends}.", flush=True)
    return price


def _jobs(addresses: list[str]) -> list[tuple[Place, Place]]:
    """What each Job reads and writes.

    A bucket that several Jobs mount takes the last writer's file and shows it to the others half a
    minute later, so two Jobs cannot share an output as processes on a shared folder do: every input
    is a Job of its own.

    Raises:
        UserError: an address is not one, the output is no bucket, or two inputs would be written to
            the same place.
    """
    *sources, target = addresses
    if not sources:
        raise UserError(
            "IN and OUT: two addresses are needed, what is read and where it is written",
            code="usage",
        )
    if not target.startswith("hf://buckets/"):
        raise UserError(
            f"{target}: a Job can only write to a bucket; make one with hf buckets create NAME, "
            "and name it as "
            "hf://buckets/ACCOUNT/NAME/FILE",
            code="hub-jobs-address",
        )
    reads = [_place(source, "/in") for source in sources]
    if len(reads) == 1:
        return [(reads[0], _place(target, "/out"))]
    # Several inputs go into one folder, each under its own name, so two of the same name would
    # overwrite each other.
    names = [PurePosixPath(source.path or source.volume.source).name for source in reads]
    _refuse_same_names(names, target)
    return [
        (source, _place(f"{target.rstrip('/')}/{name}", "/out"))
        for source, name in zip(reads, names, strict=True)
    ]


def _refuse_same_names(names: list[str], target: str) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(
            f"{twice[0]}: two inputs have this name, and their Jobs would both write "
            f"{target}/{twice[0]}; start them with one command each",
            code="hub-jobs-address",
        )


def _place(address: str, mount_path: str) -> Place:
    found = _ADDRESS.fullmatch(address)
    if not found:
        raise UserError(
            f"{address}: not an address of the hub; give hf://datasets/ACCOUNT/NAME/FILE or "
            "hf://buckets/ACCOUNT/NAME/FILE",
            code="hub-jobs-address",
        )
    volume = Volume(
        type=found["kind"].removesuffix("s"),
        source=found["name"],
        mount_path=mount_path,
        revision=found["revision"],
        # The input cannot be changed by a Job, whatever its flags say.
        read_only=True if mount_path == "/in" else None,
    )
    return Place(volume, found["path"] or "")


def _check_price(api: HfApi, flavor: str, price: float) -> None:
    """Ask the hub what the machine costs now, and refuse what is dearer than was said."""
    # Our list may be old. What is agreed to is the price that was printed, so a higher one stops
    # here, before anything is paid; a lower one is welcome.
    with _job_errors("the prices of Jobs", "nothing was started; try again"):
        offered = {one.name: one for one in api.list_jobs_hardware()}
    if flavor not in offered:
        raise UserError(
            f"--flavor {flavor}: the hub does not offer it now; it has {', '.join(offered)}",
            code="hub-jobs-price",
        )
    # In millionths of a dollar per minute, so the price of an hour is only known to the cent.
    now = round(offered[flavor].unit_cost_micro_usd * 60 / 1e6, 2)
    if now > price:
        raise UserError(
            f"--flavor {flavor}: the hub now asks ${now:.2f} per hour, more than ${price:.2f}; if "
            "you agree, add "
            f"--dollars_per_hour {now:.2f}",
            code="hub-jobs-price",
        )


@contextmanager
def _job_errors(what: str, after_a_break: str) -> Iterator[None]:
    try:
        yield
    except HUB_ERRORS as error:
        line = f"{what}: {explain(error, {402: _CREDIT, 403: _RIGHT}, after_a_break)}"
        raise UserError(line, code="hub-jobs-failed") from error


def _in_words(seconds: int) -> str:
    hours, minutes = divmod(seconds // 60, 60)
    return " ".join(
        filter(None, [f"{hours} h" if hours else "", f"{minutes} min" if minutes else ""])
    )


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = OneLineParser(
        prog="deployment/hub_jobs.py",
        description=__doc__,
        epilog="All other flags are those of python -m inference.score, and go to the Job.",
    )
    add = parser.add_argument
    add(
        "addresses",
        nargs="+",
        metavar="IN ... OUT",
        help="what is read, and the bucket it is written to",
    )
    add(
        "--model",
        required=True,
        metavar="ACCOUNT/NAME",
        help="a model repository with its artefacts",
    )
    add(
        "--image",
        required=True,
        help="an image with this program: one with PyTorch (make image-torch) from a registry that "
        "the hub reaches, or "
        "hf.co/spaces/ACCOUNT/NAME, a Space that was published from here (which reads no Parquet)",
    )
    add(
        "--flavor",
        choices=HUB_FLAVORS,
        default="cpu-upgrade",
        metavar="NAME",
        help=f"the machine (default: cpu-upgrade): {', '.join(HUB_FLAVORS)}",
    )
    add(
        "--timeout",
        type=_duration,
        default="1h",
        metavar="2h",
        help="when the hub ends a Job: 90m, 2h, 1d (default: 1h)",
    )
    add(
        "--dollars_per_hour",
        type=above_zero,
        metavar="N",
        help="the most that you agree to (default: the price of our list)",
    )
    add("--namespace", metavar="NAME", help="the organization that pays (default: your account)")
    add("--yes", action="store_true", help="start it, and pay for it")
    return parser.parse_known_args()


def _duration(text: str) -> int:
    found = re.fullmatch(r"(\d+)([mhd])", text)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(
            f"{text}: must be minutes, hours or days, such as 90m, 2h or 1d"
        )
    return int(found[1]) * _SECONDS[found[2]]


if __name__ == "__main__":
    run_command(main)
