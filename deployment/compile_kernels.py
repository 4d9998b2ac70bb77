"""Compile the native engine's kernels in place, as pyproject.toml says, with nothing but a C compiler.

python deployment/compile_kernels.py [pyproject.toml]. What an installation does through setuptools, an image does so.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def main() -> int:
    pyproject = Path(sys.argv[1] if len(sys.argv) > 1 else "pyproject.toml")
    (module,) = tomllib.loads(pyproject.read_text())["tool"]["setuptools"]["ext-modules"]
    target = Path(*module["name"].split(".")).with_suffix(EXTENSION_SUFFIXES[0])
    libraries = [f"-l{name}" for name in module["libraries"]]
    command = ["gcc", "-shared", "-fPIC", *module["extra-compile-args"], *module["sources"], "-o", target, *libraries]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
