"""The server with an observer that is switched off and on all the time, and notes what each slice of
time cost: `python -m benchmarks.drift.switched_server PORT SECONDS FILE`.

The processor's speed changes by a tenth within seconds, as others use the same machine: far more
than observing costs. Only neighbouring slices of one process can be compared.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import uvicorn

from inference.app import create_app

# So that what drifts evenly is on both sides of two pairs.
TURNS = (False, True, True, False)


def main() -> None:
    port, seconds, path = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    app = create_app()
    observer = app.state.parts.observer
    saw, turns, num_texts = observer.saw, cycle(TURNS), 0
    is_on, before = False, [0.0] * 4

    def count(served: Any, request_id: str, caller: str, texts: Any, *more: Any) -> None:
        nonlocal num_texts
        num_texts += len(texts)
        if is_on:
            saw(served, request_id, caller, texts, *more)

    def switch(*_: object) -> None:
        nonlocal is_on, before
        threads = [one.ident for one in threading.enumerate() if one.name == "observe"]
        if not threads or threads[0] is None:
            return  # it still starts
        # The observer continues after the slice that its texts came in, so its time is apart.
        observing_s = time.clock_gettime(time.pthread_getcpuclockid(threads[0]))
        now = [time.monotonic(), num_texts, time.process_time() - observing_s, observing_s]
        passed = [one - then for one, then in zip(now, before, strict=True)]
        with path.open("a") as file:
            file.write(json.dumps([is_on, *passed]) + "\n")
        is_on, before = next(turns), now

    observer.saw = count
    signal.signal(signal.SIGALRM, switch)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    uvicorn.run(app, host="127.0.0.1", port=port, log_config=None, access_log=False)


if __name__ == "__main__":
    main()
