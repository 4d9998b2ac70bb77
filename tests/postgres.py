"""A PostgreSQL server for tests, on a socket in a folder of its own."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
from pathlib import Path
from types import TracebackType


class PostgresServer:
    """Started by ``with``; the programs refuse to run as root, so root starts them as ``nobody``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._as_user: list[str] = []

    def __enter__(self) -> PostgresServer:
        data = self._folder / "data"
        data.mkdir()
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._as_user = ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
            for folder in (data, self._folder):
                os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            # Folders of tests are closed to everyone but their owner.
            for parent in self._folder.parents:
                if parent.stat().st_uid == 0 and parent != Path("/") and str(parent) != "/tmp":
                    parent.chmod(parent.stat().st_mode | 0o011)
        self._run("initdb", "--pgdata", data, "--auth", "trust", "--username", "tests", "--no-sync")
        settings = f"-c listen_addresses= -c unix_socket_directories={self._folder} -c fsync=off"
        self._run("pg_ctl", "start", "--wait", "--pgdata", data, "--options", settings, "--log", data / "log")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run("pg_ctl", "stop", "--wait", "--pgdata", self._folder / "data", "--mode", "fast")

    def new_database(self) -> str:
        """The address of an empty database."""
        name = f"tests{next(self._numbers)}"
        self._run("createdb", "--host", self._folder, "--username", "tests", name)
        return f"postgresql://tests@/{name}?host={self._folder}"

    def _run(self, program: str, *arguments: str | Path) -> None:
        command = [*self._as_user, shutil.which(program) or program, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self._folder)
        assert done.returncode == 0, done.stderr
