"""Several workers behind one port: what they do together, and what happens when one of them dies."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from common.hardware import Hardware
from common.model_folder import read_manifest, write_manifest
from inference.engines import selection
from inference.http.workers import Supervisor, num_workers, share_of
from inference.metrics import ServerMetrics, merged, render_merged
from inference.settings import Settings
from tests.inference.cascades import NEWS, make_cascade
from tests.inference.servers import Server, metric, num_arrived, stand_in_server
from tests.inference.stand_in_model import CALIBRATION, stand_in, text_of
from tests.processes import wait_until

KEY = "open sesame"


@pytest.fixture
def two_workers(model_folder: Path, tmp_path: Path) -> Iterator[Server]:
    with _two_workers(model_folder, tmp_path) as server:
        yield server


def _two_workers(
    folder: Path, tmp_path: Path, seconds_per_token: float = 0.0, **settings: str
) -> AbstractContextManager[Server]:
    return stand_in_server(folder, tmp_path, seconds_per_token, WORKERS="2", API_KEY=KEY, **settings)


def _pids(server: Server) -> set[int]:
    pid = server.process.pid
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def _worker_of(response: httpx.Response) -> str:
    return response.headers["x-request-id"].partition("-")[0]  # each process has a prefix of its own


@contextmanager
def _clients_of_both(server: Server) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Clients whose connections two different workers have; which one gets a connection is up to the kernel."""
    with ExitStack() as opened:
        by_worker: dict[str, httpx.Client] = {}
        while len(by_worker) < 2:
            client = opened.enter_context(server.new_client(KEY))
            by_worker.setdefault(_worker_of(client.get("/livez")), client)
        one, other = by_worker.values()
        yield one, other


@contextmanager
def _asking(server: Server, failed: list[Exception], statuses: list[int]) -> Iterator[None]:
    """Eight clients ask on and on; one whose connection breaks notes it and makes a new one."""
    stopped = threading.Event()

    def ask(number: int) -> None:
        client = server.new_client(KEY)
        for i in range(100_000):
            try:
                statuses.append(client.post("/predict", json={"text": text_of(1000 * number + i)}).status_code)
            except httpx.HTTPError as error:
                failed.append(error)
                client.close()
                client = server.new_client(KEY)
            if stopped.is_set():
                break
        client.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(statuses) > 50)
        yield
        enough = len(statuses) + 50
        wait_until(lambda: len(statuses) > enough)
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def test_no_worker_says_ready_before_all_have_loaded_the_model(model_folder: Path, tmp_path: Path) -> None:
    def one_has_loaded(server: Server) -> bool:
        return (tmp_path / "one").exists() and server.log().count('"message":"serving ') == 1

    settings = {"WORKERS": "2", "LOAD_ONE_AT_ONCE": str(tmp_path)}
    with stand_in_server(model_folder, tmp_path, 0.0, is_up=one_has_loaded, **settings) as server:
        with _clients_of_both(server) as clients:
            answers = [client.get("/readyz") for client in clients]
            assert [answer.status_code for answer in answers] == [503, 503]
            assert any("other workers of this server are still loading" in answer.text for answer in answers)
            (tmp_path / "go").touch()
            for client in clients:
                wait_until(lambda client=client: client.get("/readyz").status_code == 200)
                assert client.post("/predict", json={"text": "oil"}).status_code == 200
        # One that replaces a worker from now on is ready as soon as it serves.
        before = _pids(server)
        os.kill(min(before), signal.SIGKILL)
        wait_until(lambda: len(_pids(server) - before) == 1)
        with _clients_of_both(server) as clients:
            assert [client.get("/readyz").status_code for client in clients] == [200, 200]


def test_a_killed_worker_is_replaced_and_loses_only_what_it_held(model_folder: Path, tmp_path: Path) -> None:
    failed: list[Exception] = []
    statuses: list[int] = []
    with _two_workers(model_folder, tmp_path, seconds_per_token=0.0005) as server:
        before = _pids(server)
        with _asking(server, failed, statuses):
            answered = metric(server.client, "requests_total", route="/predict", status="200")
            os.kill(min(before), signal.SIGKILL)
            wait_until(lambda: len(_pids(server) - before) == 1 and metric(server.client, "model_ready") == 1)
        assert len(_pids(server)) == 2
        # What the dead worker had counted when the metrics were last read still counts.
        assert metric(server.client, "requests_total", route="/predict", status="200") > answered
        with _clients_of_both(server) as clients:
            assert [one.post("/predict", json={"text": "oil"}).status_code for one in clients] == [200, 200]
        assert "ended with signal 9; another one replaces it in" in server.log()
        assert server.stop() == 0
    assert set(statuses) == {200}
    assert len(failed) <= 8  # one for each connection that it had


def test_the_workers_end_when_the_supervisor_is_killed(two_workers: Server) -> None:
    workers = _pids(two_workers)
    assert len(workers) == 2
    two_workers.process.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() and _runs(pid) for pid in workers))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_metrics_are_those_of_all_workers_whichever_answers(two_workers: Server) -> None:
    with _clients_of_both(two_workers) as (one, other):
        for client in (one, other, other):
            assert client.post("/predict", json={"text": "oil"}).status_code == 200
        for client in (one, other):
            assert metric(client, "requests_total", route="/predict", status="200") == 3
            assert metric(client, "model_ready") == 1


def test_a_rate_limit_holds_over_all_workers(model_folder: Path, tmp_path: Path) -> None:
    with (
        _two_workers(model_folder, tmp_path, RATE_LIMIT_PER_S="5") as server,
        _clients_of_both(server) as (one, other),
    ):
        assert one.post("/predict/batch", json={"texts": ["oil"] * 100}).status_code == 200
        wait_until(lambda: other.post("/predict", json={"text": "oil"}).status_code == 429)


def test_a_reload_reaches_all_workers_or_none(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(model_folder / "tokenizer.json", folder)
    failed: list[Exception] = []
    statuses: list[int] = []
    with _two_workers(folder, tmp_path, seconds_per_token=0.0005) as server:
        before = server.client.get("/model").json()["revision"]
        time.sleep(0.01)  # another modification time, so another revision
        good = (folder / "tokenizer.json").read_bytes()
        (folder / "tokenizer.json").write_text("{}")
        refused = server.client.post("/admin/reload")
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "model_refused")
        with _clients_of_both(server) as clients:
            assert {one.get("/model").json()["revision"] for one in clients} == {before}
        assert metric(server.client, "model_reloads_total", result="refused") == 1
        (folder / "tokenizer.json").write_bytes(good)
        old = _pids(server)
        with _asking(server, failed, statuses):
            reloaded = server.client.post("/admin/reload").json()["revision"]
            assert reloaded != before
            wait_until(lambda: not old & _pids(server))
        with _clients_of_both(server) as clients:
            assert {one.get("/model").json()["revision"] for one in clients} == {reloaded}
        assert metric(server.client, "model_reloads_total", result="served") == 2  # the start, and this one
    assert not failed
    assert set(statuses) == {200}


def test_a_model_that_cannot_keep_the_settings_replaces_no_worker(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(model_folder / "tokenizer.json", folder)
    (folder / "calibration.json").write_text(json.dumps(CALIBRATION))
    with _two_workers(folder, tmp_path, MAX_ERROR="5%") as server:
        before = _pids(server)
        (folder / "calibration.json").unlink()
        refused = server.client.post("/admin/reload")
        assert refused.status_code == 422
        assert "this model is not calibrated" in refused.json()["error"]["message"]
        with _clients_of_both(server) as clients:
            answers = [one.post("/predict", json={"text": "oil"}).json() for one in clients]
        assert answers[0] == answers[1]
        assert "abstained" in answers[0]
        assert _pids(server) == before


def test_a_reload_takes_the_place_of_a_worker_that_is_still_starting(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(model_folder / "tokenizer.json", folder)
    (tmp_path / "go").touch()
    # Workers load one after the other from here on, as one waits for a file that comes and goes.
    with _two_workers(folder, tmp_path, LOAD_ONE_AT_ONCE=str(tmp_path)) as server:
        before = server.client.get("/model").json()["revision"]
        (tmp_path / "go").unlink()
        old = _pids(server)
        os.kill(min(old), signal.SIGKILL)
        wait_until(lambda: len(_pids(server) - old) == 1)  # and waits
        (starting,) = _pids(server) - old
        os.utime(folder / "tokenizer.json")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(_pids(server) - old) == 3)
        (tmp_path / "go").touch()
        wait_until(lambda: len(_pids(server)) == 2 and not (old | {starting}) & _pids(server))
        with _clients_of_both(server) as clients:
            revisions = {one.get("/model").json()["revision"] for one in clients}
    assert len(revisions) == 1
    assert before not in revisions


def test_a_stream_outlives_a_reload_and_the_grace_time(model_folder: Path, tmp_path: Path) -> None:
    with _two_workers(model_folder, tmp_path, DRAIN_SECONDS="0", GRACE_SECONDS="0.5") as server:
        old = _pids(server)
        told = threading.Event()

        def lines() -> Iterator[bytes]:
            yield b'{"text": "oil"}\n' * 40
            told.wait()
            yield b'{"text": "goal"}\n' * 40

        with ThreadPoolExecutor(1) as pool:
            headers = {"Content-Type": "application/x-ndjson"}
            answer = pool.submit(server.client.post, "/predict/batch", content=lines(), headers=headers)
            with server.new_client(KEY) as other:
                wait_until(lambda: metric(other, "requests_in_progress") > 1)
                assert other.post("/admin/reload").status_code == 200
            wait_until(lambda: len(old & _pids(server)) == 1)  # the one without the stream is gone
            time.sleep(1)  # twice the grace time
            told.set()
            assert len(answer.result().text.splitlines()) == 80
        wait_until(lambda: not old & _pids(server))


def test_a_process_that_cannot_be_started_is_tried_again_and_signals_still_arrive(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    monkeypatch.setattr(os, "fork", refuse)
    supervisor = Supervisor(Settings(model_checkpoint=model_folder), 2, stand_in(), lambda *_: None)
    try:
        num_files = len(list(Path("/proc/self/fd").iterdir()))
        supervisor._start(0)
        assert [act.args for _, act in supervisor._due] == [(0,)]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
        assert len(list(Path("/proc/self/fd").iterdir())) == num_files
    finally:
        gc.unfreeze()
        supervisor._selector.close()


def test_a_worker_that_keeps_dying_is_replaced_later_and_later(model_folder: Path, tmp_path: Path) -> None:
    with _two_workers(model_folder, tmp_path) as server:
        for _ in range(4):
            before = _pids(server)
            os.kill(max(before), signal.SIGKILL)  # the newest
            wait_until(lambda before=before: len(_pids(server) - before) == 1)
        lines = [line for line in server.log().splitlines() if "another one replaces it in" in line]
    pauses = [float(line.partition("replaces it in ")[2].split()[0]) for line in lines]
    assert pauses[2:] == [2 * pauses[1], 4 * pauses[1]]


def test_connections_to_a_dead_worker_wait_for_the_one_that_takes_its_place(two_workers: Server) -> None:
    before = _pids(two_workers)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert httpx.get(f"{two_workers.address}/livez", timeout=30).status_code == 200
    assert not before & _pids(two_workers)


def _with_processors(monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))


@pytest.mark.parametrize(
    ("processors", "workers", "threads"), [(1, 1, 1), (2, 1, 2), (8, 1, 8), (12, 2, 6), (64, 8, 8), (128, 16, 8)]
)
def test_auto_is_a_worker_for_about_eight_processors(
    monkeypatch: pytest.MonkeyPatch, processors: int, workers: int, threads: int
) -> None:
    _with_processors(monkeypatch, processors)
    monkeypatch.setattr("inference.http.workers.is_native_without_comparison", lambda *_: True)
    settings = Settings(max_connections=1000, cache_entries=100)
    assert num_workers(settings) == workers
    share = share_of(settings, workers)
    assert share.hardware.num_threads == threads
    assert workers * threads <= processors
    assert 1000 <= share.max_connections * workers < 1000 + workers
    assert 100 <= share.cache_entries * workers < 100 + workers


def test_auto_is_one_worker_if_the_weights_could_not_be_shared(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    _with_processors(monkeypatch, 64)
    assert num_workers(Settings(model_checkpoint=model_folder)) == 1  # no artefact: PyTorch
    assert num_workers(Settings(model_checkpoint=model_folder, workers=3)) == 3


def test_a_number_of_workers_that_is_none_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "257", "-1", "2.5", "many"):
        monkeypatch.setenv("WORKERS", value)
        with pytest.raises(Exception, match="WORKERS: must be auto, or a number from 1 to 256"):
            Settings.from_environment()
    monkeypatch.setenv("WORKERS", "AUTO")
    assert Settings.from_environment().workers == "auto"
    monkeypatch.setenv("WORKERS", "16")
    assert Settings.from_environment().workers == 16


def test_merged_metrics_add_up_counts_and_take_the_least_and_the_most_where_a_sum_says_nothing() -> None:
    one, other = ServerMetrics(), ServerMetrics()
    one.request_done("/predict", "POST", 200, 0.01, None)
    other.request_done("/predict", "POST", 200, 0.03, None)
    other.request_done("/model", "GET", 200, 0.03, None)
    for metrics in (one, other):
        metrics.watch("api_key_required", "Whether.", lambda: 1.0)
    for metrics, is_ready, seconds in ((one, 1.0, 2.0), (other, 0.0, 3.0)):
        metrics.watch("model_ready", "Whether.", lambda is_ready=is_ready: is_ready)
        metrics.watch("queue_seconds", "Seconds.", lambda seconds=seconds: seconds)
        metrics.watch("requests_in_progress", "Requests.", lambda: 1.0)
    text = render_merged([one.snapshot(), other.snapshot()], "")[0].decode()
    for line in (
        'distrinews_requests_total{method="POST",route="/predict",status="200"} 2.0',
        'distrinews_requests_total{method="GET",route="/model",status="200"} 1.0',
        'distrinews_request_seconds_bucket{le="0.02",route="/predict"} 1.0',
        'distrinews_request_seconds_bucket{le="0.03",route="/predict"} 2.0',
        "distrinews_model_ready 0.0",
        "distrinews_queue_seconds 3.0",
        "distrinews_api_key_required 1.0",
        "distrinews_requests_in_progress 2.0",
    ):
        assert line in text, line
    assert {kind for _, _, kind, _ in merged([one.snapshot()], only_counts=True)} == {"counter", "histogram"}
    alone = one.render("")[0].decode()
    assert render_merged([one.snapshot()], "")[0].decode().count("\n") == alone.count("\n")


def test_only_the_native_engine_chosen_without_a_comparison_is_loaded_before_the_fork(
    model_folder: Path, exported_folder: Path, tmp_path: Path
) -> None:
    hardware = Hardware()
    assert not selection.is_native_without_comparison(model_folder, "auto", hardware)
    assert not selection.is_native_without_comparison(exported_folder, "onnx", hardware)
    assert not selection.is_native_without_comparison(exported_folder, "auto", Hardware(device="cuda"))
    assert selection.is_native_without_comparison(exported_folder, "native", hardware)

    cascade = make_cascade(NEWS, NEWS, tmp_path / "cascade")
    assert selection.is_native_without_comparison(cascade, "auto", hardware)
    small = read_manifest(cascade / "small")
    write_manifest(cascade / "small", replace(small, engine="onnx"))
    assert not selection.is_native_without_comparison(cascade, "auto", hardware)


def test_the_supervisor_says_in_one_line_where_and_how_many(two_workers: Server) -> None:
    lines = [line for line in two_workers.log().splitlines() if "listening on" in line]
    assert len(lines) == 1
    assert f"127.0.0.1:{two_workers.port}: 2 workers with 1 threads each" in lines[0]
    assert "Uvicorn" not in two_workers.log()


def test_ctrl_c_lets_workers_answer_what_they_have(model_folder: Path, tmp_path: Path) -> None:
    statuses: list[int] = []
    with _two_workers(model_folder, tmp_path, seconds_per_token=0.03, DRAIN_SECONDS="0") as server:

        def ask(number: int) -> None:
            with server.new_client(KEY) as client:
                statuses.append(client.post("/predict", json={"text": text_of(number)}).status_code)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        wait_until(lambda: num_arrived(server.client) == 10)
        begun = time.monotonic()
        os.killpg(server.process.pid, signal.SIGINT)  # as a terminal would
        for thread in threads:
            thread.join()
        assert server.process.wait(timeout=30) == 0
        assert time.monotonic() - begun < 25
    assert statuses == [200] * 10
