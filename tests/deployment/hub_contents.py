"""What the stand-in for the hub holds: repositories, of each its newest files alone, and how it is to behave."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.deployment.card_rules import front_matter


@dataclass
class Repository:
    """One repository; its newest files alone."""

    kind: str
    name: str
    private: bool = False
    sdk: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    # The SHA-256 and size of what is stored beside git.
    large: dict[str, tuple[str, int]] = field(default_factory=dict)
    commits: list[list[str]] = field(default_factory=list)

    @property
    def head(self) -> str:
        """The newest commit."""
        return hashlib.sha1(f"{self.name} {len(self.commits)}".encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """What the hub tells of a repository."""
        names = sorted({*self.files, *self.large})
        card = front_matter(self.files.get("README.md", b"").decode())
        facts = {"id": self.name, "sha": self.head, "private": self.private, "tags": card.get("tags", [])}
        facts |= {"cardData": card, "siblings": [{"rfilename": name} for name in names]}
        return facts | ({"sdk": card.get("sdk", self.sdk)} if self.kind == "spaces" else {})

    def tree(self) -> list[dict[str, Any]]:
        """Every file with its hash."""
        entries = [file_entry(name, content) for name, content in self.files.items()]
        for name, (oid, size) in self.large.items():
            lfs = {"oid": oid, "size": size, "pointerSize": 130}
            entries.append({"type": "file", "path": name, "oid": "0" * 40, "size": size, "lfs": lfs})
        return entries


@dataclass
class Hub:
    """What the hub holds, what it was asked, and how it is to behave."""

    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    xet_shards: list[bytes] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    address: str = ""
    has_plan: bool = True
    # What it runs Jobs on, in millionths of a dollar per minute, and the Jobs it was told to start.
    prices: dict[str, int] = field(default_factory=lambda: {"cpu-basic": 167, "cpu-upgrade": 500, "cpu-xl": 16667})
    jobs: list[dict[str, Any]] = field(default_factory=list)
    # Large files that get through before every further one breaks, or the Job that does; None breaks none.
    breaks_after: int | None = None
    # The stages that a Space goes through after a commit, one a question; the last one stays.
    # "@old" marks one of the commit before.
    stages: list[str] = field(default_factory=lambda: ["BUILDING", "APP_STARTING", "RUNNING"])
    build_log: list[str] = field(default_factory=list)
    # Where the Space's own server is.
    app: str = ""
    # What another publisher does between the first look at a repository and the commit.
    meanwhile: Callable[[Repository], None] = lambda repository: None
    # Changes what is stored, to be found when it is read back.
    corrupt: Callable[[Repository], None] = lambda repository: None

    def repository(self, kind: str, name: str) -> Repository:
        """One repository by its name."""
        return self.repositories[kind, name]

    def count(self, pattern: str) -> int:
        """How many requests match."""
        return sum(bool(re.match(pattern, line)) for line in self.asked)


def file_entry(name: str, content: bytes) -> dict[str, Any]:
    """What the hub tells of a file in git."""
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return {"type": "file", "path": name, "oid": oid, "size": len(content)}
