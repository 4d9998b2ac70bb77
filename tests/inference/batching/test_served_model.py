"""The model of a server: however often it is loaded again, the process keeps its size."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.processes import REPOSITORY, run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and asks glibc")

# Prints after each load the process's resident bytes, and at the end how many pools of memory glibc has.
_RELOADS = """
import asyncio, ctypes, os, re, sys, tempfile
from pathlib import Path
from inference.batching.served_model import ServedModel
from inference.engines import native
from inference.engines.model_loader import ModelLoader
from inference.metrics import ServerMetrics
from inference.settings import Settings

folder, engine, count = sys.argv[1:]
if engine == "numpy":
    native.library_path, engine = lambda: None, "native"
settings = Settings(model_checkpoint=Path(folder), engine=engine)
texts = [f"Oil prices rise again as stocks fall {number}" for number in range(32)]

async def reload():
    served = ServedModel(settings, ServerMetrics(), lambda path, engine: ModelLoader(path, engine, settings.hardware))
    for _ in range(int(count)):
        classifier = (await served.load()).classifier
        await asyncio.gather(*classifier.submit(texts, 60.0))
        while len(asyncio.all_tasks()) > 1:  # the model before is not freed yet
            await asyncio.sleep(0.01)
        print(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))

asyncio.run(reload())
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(len(re.findall("<heap nr", Path(file.name).read_text())))
"""


def _reloads(folder: Path, engine: str, count: int) -> tuple[list[int], int]:
    run = run_python(["-c", _RELOADS, folder, engine, str(count)])
    assert run.returncode == 0, run.stderr
    *sizes, pools = map(int, run.stdout.split())
    assert len(sizes) == count
    return sizes, pools


def test_reloads_add_no_pool_of_memory() -> None:
    _, pools = _reloads(REPOSITORY / "checkpoints" / "news", "native", 5)
    assert pools <= 2


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "numpy", "onnx", "torch"])
def test_forty_reloads_keep_the_memory_of_two(engine: str, exported_folder: Path) -> None:
    folder = exported_folder if engine in ("onnx", "torch") else REPOSITORY / "checkpoints" / "news"
    sizes, _ = _reloads(folder, engine, 42)
    assert max(sizes[2:]) <= 1.2 * sizes[1]
