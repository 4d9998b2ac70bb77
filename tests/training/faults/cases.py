"""The faults of the matrix, family by family, in the order of the table."""

from __future__ import annotations

import random

from tests.training.faults.faults import Fault, Injection

AGAIN = "restarts and resumes"
SAVED = "saves and stops; resumes when started again"
NAMED = "names the rank and where it is; " + AGAIN
REPORTED = "reports the failed save and tries again; training continues"
DAMAGED = "names the damaged checkpoint and resumes from the newest complete one"
WENT_ON = r"Training continues, but the checkpoint of step \d+ could not be written.*"

NO_RESTARTS = ("--standalone", "--nproc_per_node=2", "--max_restarts=0")
TWO_MACHINES = ("--nnodes=2", "--nproc_per_node=1", "--max_restarts=3")
MEETING = ("--rdzv_backend=c10d", "--rdzv_endpoint=10.77.0.1:29400", "--rdzv_id=faults")
SHORT_WAIT = ("--collective_timeout", "20")
KILLS = 100
AT_THE_END = 5  # of the kills


def _killed() -> list[Fault]:
    moments = {  # what the rank is at, and the steps done then
        "while the program loads": ("imports training.run.trainer", None),
        "in a forward pass": ("phase forward", 5),
        "in a backward pass": ("phase backward", 5),
        "in an optimizer step": ("phase optimizer", 5),
        "while ranks agree": ("phase agree", 6),
        "in an evaluation": ("phase evaluate", 8),
        "while it copies a save": ("phase save", 6),
        "while it writes a save": ("writes */.step_00000006.tmp/*.distcp", None),
        "while it hashes a save": ("reads */.step_00000006.tmp/*.distcp", None),
        "after the last step": ("phase finish", 16),
    }
    of_rank_0 = {  # what rank 0 does alone
        "while it prepares the data": "reads */sample_news/train.csv",
        "before a save's manifest": "writes */.step_00000006.tmp/.manifest.json.*",
        "before a save's rename": "renames */step_00000006",
        "before `latest` moves": "renames */latest",
        "while it removes an old checkpoint": "removes */step_00000002/manifest.json",
    }
    both = [
        Fault(f"rank {rank} killed {when}", AGAIN, (Injection(on, rank=rank, after=after),))
        for when, (on, after) in moments.items()
        for rank in (0, 1)
    ]
    return both + [Fault(f"rank 0 killed {when}", AGAIN, (Injection(on),)) for when, on in of_rank_0.items()]


def _stopped() -> list[Fault]:
    everyone, other = "kill -TERM $(pgrep -P $LAUNCHER)", "$(pgrep -P $LAUNCHER | grep -vx $PID)"

    def in_a_step(do: str, rank: int = 0) -> Injection:
        return Injection("phase forward", do, rank, after=5)

    asked = {  # and what torchrun ends with
        "SIGTERM to both ranks": (in_a_step(everyone), 0),
        "SIGTERM to rank 1": (in_a_step("kill -TERM $PID", rank=1), 0),
        "SIGTERM to both in an evaluation": (Injection("phase evaluate", everyone, after=8), 0),
        "SIGTERM to torchrun": (in_a_step("kill -TERM $LAUNCHER"), -1),
        "torchrun killed": (in_a_step("kill -9 $LAUNCHER"), -1),
    }
    return [
        *(Fault(name, SAVED, (injection,), code=code, all_saved=True) for name, (injection, code) in asked.items()),
        Fault(
            "SIGTERM to rank 0 while rank 1 is frozen",
            "rank 0 exits within 20 s without saving; resumes when started again",
            (in_a_step(f"kill -TERM {other}; kill -STOP $PID", rank=1),),
            code=-1,
            launcher=NO_RESTARTS,
        ),
    ]


def _stuck() -> list[Fault]:
    frozen, waiting = "kill -STOP $PID", "waiting without end"
    slow = "each linear layer twenty times"
    said = r"error: .*rank 1 .*"
    return [
        Fault("rank 1 frozen (SIGSTOP)", NAMED, (Injection("phase forward", frozen, 1, 5),), SHORT_WAIT, says=said),
        Fault(
            "rank 1 waits for data without end", NAMED, (Injection("phase data", waiting, 1, 5),), SHORT_WAIT, says=said
        ),
        Fault(
            "rank 1 slower than rank 0",
            "names the rank and its slow phase; training continues",
            (Injection("phase data", slow, 1, 0),),
            epochs=8,
            says=r"Straggler: rank 1 .*forward.*",
        ),
    ]


def _stored() -> list[Fault]:
    fill, free = "head -c 1G /dev/zero > $CHECKPOINTS/../fill || true", "rm $CHECKPOINTS/../fill"
    # Over it, not the disk itself: the run holds its lock open for writing there.
    lock, unlock = "mount --bind -o ro $CHECKPOINTS $CHECKPOINTS", "umount --lazy $CHECKPOINTS"
    flip = (
        "import sys; f = open(sys.argv[1], 'r+b'); f.seek(999); b = f.read(1)[0]; f.seek(999); f.write(bytes([b ^ 1]))"
    )
    newest = "$CHECKPOINTS/step_00000008"
    damages = {
        "cut short": f"truncate -s -100 {newest}/__1_0.distcp",
        "with one bit flipped": f'$PYTHON -c "{flip}" {newest}/__0_0.distcp',
        "without one of its files": f"rm {newest}/__0_0.distcp",
        "without its manifest": f"rm {newest}/manifest.json",
    }

    def for_a_while(bad: str, good: str) -> tuple[Injection, Injection]:
        return Injection("writes */.step_00000010.tmp/*.distcp", bad), Injection("phase forward", good, after=13)

    def damaged(do: str) -> tuple[Injection]:
        # The fourth time that `latest` moves the checkpoint of step 8 stands under its name.
        return (Injection("renames */latest", f"{do}; kill -9 $PID", count=4),)

    return [
        Fault("disk full, later room again", REPORTED, for_a_while(fill, free), disk=256, says=WENT_ON),
        Fault("checkpoint folder read-only for a while", REPORTED, for_a_while(lock, unlock), disk=256, says=WENT_ON),
        Fault(
            "disk full for good",
            "the third failed save ends the run; resumes once there is space",
            (Injection("phase save", fill, after=6),),
            code=-1,
            repair=free,
            disk=256,
            launcher=NO_RESTARTS,
            says=r"error: .*3 times in a row.*",
        ),
        *(
            Fault(
                f"newest checkpoint {how}",
                DAMAGED,
                damaged(do),
                says=r"Skipping the damaged checkpoint.*",
                damages_newest=True,
            )
            for how, do in damages.items()
        ),
    ]


def _bucket() -> list[Fault]:
    return [
        Fault(
            "S3 server gone in the middle of a save, later back",
            REPORTED,
            flags=("--checkpoint_dir", "s3://bucket/run"),
            says=WENT_ON,
        )
    ]


def _numbers() -> list[Fault]:
    spoiled = "a loss that is not a number"
    return [
        Fault(
            "loss of rank 1 not a number, once",
            "all ranks skip the step and its rows are named; training continues",
            (Injection("phase forward", spoiled, 1, 5),),
            says=r"Skipped step 6: .*",
            left_out=(6,),
        ),
        Fault(
            "loss of rank 1 not a number, more often than --bad_steps allows",
            "rolls back to the newest checkpoint and leaves out the rows of those steps",
            (Injection("phase forward", spoiled, 1, 5), Injection("phase forward", spoiled, 1, 6)),
            ("--bad_steps", "1"),
            says=r"Went back from step 7.*",
            without=(6, 7),
        ),
        Fault(
            "clock of rank 1 set back by a day",
            "nothing depends on the clock; training continues",
            (Injection("phase data", "a clock set back by a day", 1, 5),),
        ),
        Fault(
            "metrics port taken",
            "refuses to start, in one line that names the port; trains with a free one",
            flags=("--metrics_port", "{port}"),
            code=-1,
            says=r"error: .*metrics_port.*",
        ),
        Fault(
            "rendezvous port taken",
            "refuses to start; trains with a free one",
            launcher=("--nnodes=1", "--nproc_per_node=2", "--master_port={port}", "--max_restarts=3"),
            code=-1,
            says=r".*address already in use.*",
        ),
    ]


def _network() -> list[Fault]:
    return [
        Fault(
            f"network between two machines cut for {seconds} s",
            "the ranks wait, or restart and resume",
            (
                Injection(
                    "phase forward", f"ip link set cable down; (sleep {seconds}; ip link set cable up) &", after=5
                ),
            ),
            launcher=(*TWO_MACHINES, *MEETING),
        )
        for seconds in (5, 60)
    ]


def _soak() -> list[Fault]:
    """Kills of a random rank at a moment of each kind in turn, a random time after a random one of such moments."""
    chance = random.Random(6)
    phases = [f"phase {name}" for name in ("data", "forward", "backward", "optimizer", "agree", "evaluate", "save")]
    anyone = ["starts ", *phases, "writes *.distcp", "reads */.step_*.distcp"]
    of_rank_0 = ["writes *manifest.json*", "renames */step_????????", "renames */latest", "removes *manifest.json"]
    moments = [*anyone, *of_rank_0]

    def kill(turn: int) -> Injection:
        on = "phase finish" if turn >= KILLS - AT_THE_END else moments[turn % len(moments)]
        wait = chance.uniform(0, 4 if on == "starts " else 0.05)
        often = 1 if on in ("starts ", "phase evaluate", "phase finish") else chance.randint(1, 4)
        rank = 0 if on in of_rank_0 else chance.randint(0, 1)
        return Injection(on, f"(sleep {wait:.3f}; kill -9 $PID) &", rank, count=often, turn=turn)

    return [
        Fault(
            f"{KILLS} kills at random moments, one after the other",
            AGAIN + " each time",
            tuple(map(kill, range(KILLS))),
            launcher=("--standalone", "--nproc_per_node=2", f"--max_restarts={KILLS + 10}"),
            epochs=60,
        )
    ]


KILLED, STOPPED, STUCK, STORED = _killed(), _stopped(), _stuck(), _stored()
BUCKET, NUMBERS, NETWORK, SOAK = _bucket(), _numbers(), _network(), _soak()
FAMILIES = (KILLED, STOPPED, STUCK, STORED, BUCKET, NUMBERS, NETWORK, SOAK)
