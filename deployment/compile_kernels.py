"""Compile the native engine's kernels, with nothing but a C compiler.

python deployment/compile_kernels.py [pyproject.toml]: in place, as pyproject.toml says. What an
installation does through setuptools, an image does so.

python deployment/compile_kernels.py --browser: to WebAssembly, into inference/web/, with the
compiler in the package ziglang. These files are in git, so that only who changes the kernels needs
it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_KERNELS, _WEB = "inference/engines/native", "inference/web"
# A browser refuses a whole file for one instruction that it lacks, and threads for pages without
# certain headers.
_SIMD, _RELAXED, _THREADS = "simd128+bulk_memory", "relaxed_simd", "atomics"
BROWSER_FILES = {
    "kernels.wasm": (_SIMD, ("wasm.c",)),
    "kernels-threads.wasm": (f"{_SIMD}+{_THREADS}", ("wasm.c",)),
    "kernels-relaxed.wasm": (f"{_SIMD}+{_RELAXED}", ("wasm_relaxed.c", "wasm_dot.c")),
    "kernels-relaxed-threads.wasm": (
        f"{_SIMD}+{_RELAXED}+{_THREADS}",
        ("wasm_relaxed.c", "wasm_dot.c"),
    ),
}
_SOURCES = (
    "browser.c",
    "browser_threads.h",
    "encoder.h",
    "kernels.c",
    "model.h",
    "wasm.c",
    "wasm_dot.c",
    "wasm_relaxed.c",
)
_EXPORTS = (
    "aligned_alloc",
    "free",
    "open_pool",
    "close_pool",
    "open_session",
    "close_session",
    "forward",
)
_EXPORTS += ("instruction_set", "prepare_weights", "widen_words")
_THREAD_EXPORTS = ("run_thread", "__stack_pointer")
_STACK_BYTES, _FIRST_MEMORY, _MOST_MEMORY = 65536, 2**20, 2**32 - 65536


def main() -> int:
    if "--browser" in sys.argv:
        return max(_compile_for_browsers(name) for name in BROWSER_FILES)
    pyproject = Path(sys.argv[1] if len(sys.argv) > 1 else "pyproject.toml")
    (module,) = tomllib.loads(pyproject.read_text())["tool"]["setuptools"]["ext-modules"]
    target = Path(*module["name"].split(".")).with_suffix(EXTENSION_SUFFIXES[0])
    libraries = [f"-l{name}" for name in module["libraries"]]
    # Without setuptools, which an image would need for this one command.
    flags = ["-shared", "-fPIC", *module["extra-compile-args"], *module["sources"]]
    return subprocess.run(["gcc", *flags, "-o", target, *libraries]).returncode


def _browser_command(name: str) -> list[str]:
    features, kernels = BROWSER_FILES[name]
    has_threads = _THREADS in features
    flags = ["-target", "wasm32-wasi", f"-mcpu=generic+{features}", "-mexec-model=reactor"]
    # Loops are unrolled in the sources where it pays; more only makes the file larger.
    flags += [
        "-O3",
        "-fno-unroll-loops",
        "-g0",
        "-s",
        "-std=gnu11",
        "-ffp-contract=off",
        "-DFOR_BROWSERS",
    ]
    flags += ["-Wl,--import-memory", f"-Wl,-z,stack-size={_STACK_BYTES}"]
    exports = _EXPORTS + _THREAD_EXPORTS if has_threads else _EXPORTS
    # The linker drops every function that is not exported or called from one that is.
    flags += [f"-Wl,--export={function}" for function in exports]
    flags += [f"-Wl,--initial-memory={_FIRST_MEMORY}", f"-Wl,--max-memory={_MOST_MEMORY}"]
    flags += ["-Wl,--shared-memory"] * has_threads
    return [*flags, *(f"{_KERNELS}/{source}" for source in ("kernels.c", "browser.c", *kernels))]


def sources_hash(name: str) -> bytes:
    """What a file for browsers was made of, and how: it ends with this hash."""
    # The flags are part of it: the same sources compiled otherwise are another file.
    found = hashlib.sha256(" ".join(_browser_command(name)).encode())
    for source in _SOURCES:
        found.update((_ROOT / _KERNELS / source).read_bytes())
    return found.digest()


def _compile_for_browsers(name: str) -> int:
    target = _ROOT / _WEB / name
    done = subprocess.run(
        [sys.executable, "-m", "ziglang", "cc", *_browser_command(name), "-o", target], cwd=_ROOT
    )
    if done.returncode == 0:
        # A custom section, which browsers ignore: its number 0, its length, its name with a length,
        # its content.
        section = b"\x07sources" + sources_hash(name)
        target.write_bytes(target.read_bytes() + bytes([0, len(section)]) + section)
        print(f"{_WEB}/{name}: {target.stat().st_size:,} bytes")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
