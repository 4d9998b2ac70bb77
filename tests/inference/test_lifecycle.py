from __future__ import annotations

import asyncio
import gc
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from common.errors import ModelLoadError, UserError
from inference import serve
from inference.app import create_app
from inference.batching.served_model import ServedModel
from inference.engines.model_loader import ModelLoader
from inference.metrics import ServerMetrics
from inference.settings import Settings
from tests.inference.servers import (
    Server,
    ThreadedServer,
    free_port,
    metric,
    num_arrived,
    running,
    serving,
    stand_in_server,
)
from tests.inference.stand_in_model import RAISES, StandInModel, stand_in, text_of
from tests.processes import run_python, wait_until

SLOW = 0.001  # seconds a token
KEY = "open sesame"
SENDING_KEY = {"X-API-Key": KEY}


class _Load:
    """Clients that ask on and on until they are told to leave the connection."""

    def __init__(self, server: Server, num_clients: int = 8) -> None:
        self.statuses: list[int] = []
        self.errors: list[Exception] = []
        self.stopped = threading.Event()
        self._server = server
        self._threads = [threading.Thread(target=self._ask_on, args=(i,)) for i in range(num_clients)]

    def __enter__(self) -> _Load:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: len(self.statuses) > 20)
        return self

    def __exit__(self, *failure: object) -> None:
        self.stopped.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self, number: int) -> None:
        with self._server.new_client(KEY) as client:
            for i in range(100_000):
                try:
                    response = client.post("/predict", json={"text": text_of(1000 * number + i)})
                except httpx.HTTPError as error:
                    self.errors.append(error)
                    return
                self.statuses.append(response.status_code)
                # As a balancer that looks at the ready probe would.
                if self.stopped.is_set() or response.headers.get("connection") == "close":
                    return


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_under_load_drops_nothing_and_ends_with_exit_code_0(
    model_folder: Path, tmp_path: Path, workers: str
) -> None:
    settings = {"DRAIN_SECONDS": "1", "WORKERS": workers}
    with stand_in_server(model_folder, tmp_path, SLOW, **settings) as server, _Load(server) as load:
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not server.is_ready())
        health = server.client.get("/health")
        assert health.status_code == 503
        assert "shutting down" in health.json()["error"]
        assert server.process.wait(timeout=30) == 0
        load.stopped.set()
    assert set(load.statuses) == {200}
    assert not load.errors


def test_what_was_accepted_is_answered_after_sigterm_even_without_a_drain(model_folder: Path, tmp_path: Path) -> None:
    with stand_in_server(model_folder, tmp_path, seconds_per_token=0.03, DRAIN_SECONDS="0") as server:
        with ThreadPoolExecutor(20) as pool, httpx.Client(base_url=server.address, timeout=60) as client:
            ask = [pool.submit(client.post, "/predict", json={"text": text_of(i)}) for i in range(20)]
            wait_until(lambda: num_arrived(server.client) == 20)
            server.process.send_signal(signal.SIGTERM)
            assert [one.result().status_code for one in ask] == [200] * 20
        assert server.process.wait(timeout=30) == 0


def test_the_grace_time_ends_what_does_not_end_itself(model_folder: Path, tmp_path: Path) -> None:
    settings = {"DRAIN_SECONDS": "0", "GRACE_SECONDS": "1", "REQUEST_TIMEOUT_S": "600"}
    with (
        stand_in_server(model_folder, tmp_path, seconds_per_token=3, **settings) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        text = "oil prices rise and stocks fall on wall street"
        pool.submit(httpx.post, f"{server.address}/predict", json={"text": text}, timeout=60)
        wait_until(lambda: metric(server.client, "requests_in_progress") > 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=40) == 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_load_that_does_not_end_keeps_no_server_from_stopping(
    model_folder: Path, tmp_path: Path, workers: str
) -> None:
    (tmp_path / "one").touch()  # so that all wait for another file, which never comes
    settings = {"DRAIN_SECONDS": "0", "WORKERS": workers, "LOAD_ONE_AT_ONCE": str(tmp_path)}
    with stand_in_server(model_folder, tmp_path, 0, is_up=_says_that_it_loads, **settings) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=30) == 0


def _says_that_it_loads(server: Server) -> bool:
    try:
        return "still loading" in server.client.get("/health").json()["error"]
    except httpx.TransportError:
        return False


def test_uvicorn_itself_drains_too_and_ends_with_exit_code_0(model_folder: Path, tmp_path: Path) -> None:
    command = ("uvicorn", "tests.inference.stand_in_server:app", "--no-access-log")
    with stand_in_server(model_folder, tmp_path, SLOW, command, DRAIN_SECONDS="0.5") as server:
        with _Load(server) as load:
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=30) == 0
            load.stopped.set()
        assert set(load.statuses) == {200}
        assert not load.errors
        assert '"message":"request"' in server.log()


@pytest.mark.parametrize(
    ("command", "settings", "line"),
    [
        (
            ["inference.serve"],
            {"MAX_BATCH_TEXTS": "no"},
            "error: MAX_BATCH_TEXTS: must be a whole number [setting-value]",
        ),
        (
            ["uvicorn", "inference.app:app"],
            {"PORT": "70000"},
            "error: PORT: must be at most 65535",
        ),
        (["inference.serve"], {"ENGINE": "steam", "MAX_TEXT_CHARS": "0"}, "error: ENGINE: must be 'auto'"),
        (["inference.serve"], {"MODEL_NAME": "a/b"}, "error: MODEL_NAME: must be letters, digits, . _ and -"),
        (["inference.serve"], {"REQUIRE_API_KEY": "1"}, "error: REQUIRE_API_KEY is set, but neither API_KEY nor"),
        (["uvicorn", "inference.app:app"], {"REQUIRE_API_KEY": "1"}, "error: REQUIRE_API_KEY is set, but neither"),
        (["inference.serve"], {"KEEP_TEXTS": "7d"}, "error: KEEP_TEXTS: needs OBSERVE, which says where; set that too"),
        (
            ["inference.serve"],
            {"OBSERVE": "1", "KEEP_TEXTS": "a week"},
            "error: KEEP_TEXTS: must be a duration",
        ),
        (
            ["inference.serve"],
            {"OBSERVE": "yes"},
            "error: OBSERVE: must be 1, the path of an .sqlite file",
        ),
        (
            ["inference.serve"],
            {"OBSERVE": "/missing/a.sqlite"},
            "error: OBSERVE: /missing/a.sqlite: there is no",
        ),
        (
            ["uvicorn", "inference.app:app"],
            {"OBSERVE": "/missing/a.sqlite"},
            "error: OBSERVE: /missing/a.sqlite:",
        ),
        (["inference.serve", "--port", "x"], {}, "argument --port: invalid int value: 'x'"),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_code_2(command: list[str], settings: dict[str, str], line: str) -> None:
    run = run_python(["-m", *command], **settings)
    assert run.returncode == 2
    assert line in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


def _run_server(*arguments: str, command: str = "inference.serve", **settings: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-m", command, *arguments], **settings)


@pytest.mark.parametrize(
    ("host", "port", "line"),
    [
        (
            "no such host",
            "7860",
            "give an address of this machine, such as 127.0.0.1, 0.0.0.0 (all) or ::1 [flag-value]",
        ),
        ("203.0.113.1", "0", "give an address of this machine, such as 127.0.0.1, 0.0.0.0 (all) or ::1 [flag-value]"),
        ("[203.0.113.1]", "70000", "give another --port, from 1024 to 65535 [flag-value]"),
        ("é" * 70, "0", "give an address of this machine, such as 127.0.0.1, 0.0.0.0 (all) or ::1 [flag-value]"),
    ],
)
def test_an_address_that_is_not_of_this_machine_is_one_line(host: str, port: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        serve.main(["--host", host, "--port", port])
    assert caught.value.line.endswith(line)


def test_a_port_that_is_taken_is_one_line_and_exit_code_2(model_folder: Path) -> None:
    with serving(model_folder) as client:
        port = str(client.base_url.port)
        run = _run_server("--host", "127.0.0.1", "--port", port)
        from_uvicorn = _run_server("inference.app:app", "--port", port, command="uvicorn")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.startswith(
        f"error: --host 127.0.0.1, --port {port}: cannot listen there (Address already in use)"
    )
    assert run.stderr.count("\n") == 1
    assert "model" not in from_uvicorn.stdout  # none is loaded for a port that is not there
    assert from_uvicorn.returncode != 0


def test_the_help_names_variables_their_values_and_the_page() -> None:
    run = _run_server("--help", PORT="1234")
    assert run.returncode == 0
    for words in ("--model PATH", "MODEL_CHECKPOINT; now checkpoints/", "PORT; now 1234", "docs/serving.md"):
        assert words in " ".join(run.stdout.split())


@pytest.mark.parametrize("command", ["inference.serve", "uvicorn"])
def test_the_last_word_of_a_server_without_a_model_says_so(command: str, folder_copy: Path, tmp_path: Path) -> None:
    config = json.loads((folder_copy / "config.json").read_text())
    encoder = {key: value for key, value in config.items() if not key.endswith(("label2id", "id2label"))}
    (folder_copy / "config.json").write_text(json.dumps({**encoder, "architectures": ["DistilBertModel"]}))
    port = free_port()
    what = ["--model", str(folder_copy)] if command == "inference.serve" else ["inference.app:app"]
    settings = {"MODEL_CHECKPOINT": str(folder_copy)} if command == "uvicorn" else {}
    started = [sys.executable, "-m", command, *what, "--host", "127.0.0.1", "--port", str(port)]
    with running(started, port, tmp_path / "log", Server.has_decided, warm=True, **settings) as server:
        wait_until(lambda: "kill -HUP" in server.log())
        assert server.client.post("/predict", json={"text": "oil"}).status_code == 503
        lines = [line for line in server.log().splitlines() if '"request"' not in line]
    assert "Uvicorn running" in lines[-3]
    assert f"{folder_copy}: an encoder without classes; train it: python -m training.train_single" in lines[-2]
    assert "the server runs, but without a model: every request for an answer gets 503" in lines[-1]
    assert f"kill -HUP {server.process.pid}" in lines[-1]
    assert "127.0.0.1:" not in "".join(
        line for line in lines if "Uvicorn running" not in line
    )  # no address of a client


def test_odd_metrics_of_a_model_hide_nothing_but_themselves(model_folder: Path) -> None:
    app = create_app(Settings(model_checkpoint=model_folder, api_key=KEY), stand_in())
    server = ThreadedServer(app)
    with server.running() as client:
        for odd in ({"test": None}, {"test": [1], "dataset": ["a", "b"]}, {"test": {"accuracy": "good"}, "dataset": 1}):
            server.parts.served_model.require().model.metadata = odd
            described = client.get("/model")
            assert described.status_code == 200
            assert described.json()["metrics"] == odd


@pytest.fixture
def own_folder(model_folder: Path, tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    shutil.copy(model_folder / "tokenizer.json", tmp_path / "model")
    return tmp_path / "model"


def _by_request(server: Server) -> None:
    assert server.client.post("/admin/reload").status_code == 200


def _by_signal(server: Server) -> None:
    before = metric(server.client, "model_reloads_total", result="served")
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: metric(server.client, "model_reloads_total", result="served") > before)


@pytest.mark.parametrize("reload", [pytest.param(_by_request, marks=pytest.mark.slow), _by_signal])
def test_a_reload_under_load_fails_no_request(
    own_folder: Path, tmp_path: Path, reload: Callable[[Server], None]
) -> None:
    with stand_in_server(own_folder, tmp_path, SLOW, API_KEY=KEY) as server:
        revisions = {server.client.get("/model").json()["revision"]}
        with _Load(server) as load:
            for _ in range(5):
                time.sleep(0.01)  # another modification time, so another revision
                (own_folder / "tokenizer.json").touch()
                reload(server)
                revisions.add(server.client.get("/model").json()["revision"])
        assert len(revisions) == 6
        assert set(load.statuses) == {200}
        assert not load.errors


def test_a_bad_model_is_refused_with_its_reason_and_the_old_one_stays(own_folder: Path, tmp_path: Path) -> None:
    with stand_in_server(own_folder, tmp_path, SLOW, API_KEY=KEY) as server, _Load(server) as load:
        before = server.client.get("/model").json()
        good = (own_folder / "tokenizer.json").read_bytes()
        (own_folder / "tokenizer.json").unlink()
        refused = server.client.post("/admin/reload")
        assert refused.status_code == 422
        assert refused.json()["error"]["code"] == "model_refused"
        assert "lacks tokenizer.json" in refused.json()["error"]["message"]
        (own_folder / "tokenizer.json").write_text("{}")
        assert server.client.post("/admin/reload").status_code == 422
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: metric(server.client, "model_reloads_total", result="refused") == 3)
        assert server.client.get("/model").json() == before
        assert server.is_ready()
        (own_folder / "tokenizer.json").write_bytes(good)
        assert server.client.post("/admin/reload").status_code == 200
    assert set(load.statuses) == {200}
    assert not load.errors


def test_a_reload_gives_the_memory_of_the_old_model_back(model_folder: Path) -> None:
    app = create_app(Settings(model_checkpoint=model_folder, api_key=KEY), stand_in())
    server = ThreadedServer(app)
    gc.collect()
    gc.disable()
    try:
        with server.running() as client:
            engine = weakref.ref(server.parts.served_model.require().model.engine)
            client.headers.update(SENDING_KEY)
            assert client.post("/predict", json={"text": "oil"}).status_code == 200
            assert client.post("/admin/reload").status_code == 200
            wait_until(lambda: engine() is None)
    finally:
        gc.enable()


def test_a_reload_does_not_hold_all_requests_while_the_collector_goes_through_every_import(model_folder: Path) -> None:
    looked_through: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            looked_through.append(len(gc.get_objects()))  # without those that are frozen

    server = ThreadedServer(create_app(Settings(model_checkpoint=model_folder, api_key=KEY), stand_in()))
    with server.running() as client:
        client.headers.update(SENDING_KEY)
        frozen = gc.get_freeze_count()
        engine = weakref.ref(server.parts.served_model.require().model.engine)
        gc.callbacks.append(note)
        try:
            assert client.post("/admin/reload").status_code == 200
            wait_until(lambda: engine() is None and looked_through)
        finally:
            gc.callbacks.remove(note)
    assert max(looked_through) < frozen / 2


def test_a_model_that_comes_later_is_served_by_a_reload(own_folder: Path) -> None:
    place = own_folder / "tokenizer.json"
    content = place.read_bytes()
    place.unlink()
    with serving(own_folder, api_key=KEY) as client:
        client.headers.update(SENDING_KEY)
        assert client.get("/readyz").json()["reason"].startswith("model: lacks tokenizer.json; ")
        assert client.post("/predict", json={"text": "oil"}).status_code == 503
        place.write_bytes(content)
        assert client.post("/admin/reload").status_code == 200
        assert client.post("/predict", json={"text": "oil"}).status_code == 200
        assert client.get("/readyz").status_code == 200


def _break(server: ThreadedServer, error: str | None) -> None:
    server.parts.served_model.require().model.engine.broken = error


def test_a_server_whose_passes_keep_failing_is_not_ready_until_the_model_answers_again(model_folder: Path) -> None:
    server = ThreadedServer(create_app(Settings(model_checkpoint=model_folder), stand_in()))
    with server.running() as client:
        _break(server, "out of order")
        answers = [client.post("/predict", json={"text": text_of(i)}) for i in range(6)]
        assert {(answer.status_code, answer.headers["retry-after"]) for answer in answers} == {(503, "5")}
        for path, field in (("/readyz", "reason"), ("/health", "error")):
            probe = client.get(path)
            assert probe.status_code == 503
            assert "the model fails on every text, including a known good one (out of order)" in probe.json()[field]
        assert client.get("/v2/health/ready").status_code == 503
        assert client.get("/livez").status_code == 200
        lines = {"content-type": "application/x-ndjson"}
        assert client.post("/predict/batch", content='{"text": "oil"}', headers=lines).status_code == 503
        _break(server, None)
        wait_until(lambda: client.get("/readyz").status_code == 200)
        assert client.post("/predict", json={"text": "oil"}).status_code == 200


def test_a_sticky_cuda_error_makes_the_process_look_dead_so_that_it_is_restarted(model_folder: Path) -> None:
    server = ThreadedServer(create_app(Settings(model_checkpoint=model_folder), stand_in()))
    with server.running() as client:
        _break(server, "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronous")
        for i in range(3):
            client.post("/predict", json={"text": text_of(i)})
        assert client.get("/readyz").status_code == 503
        dead = client.get("/livez")
        assert dead.status_code == 503
        assert dead.json()["reason"].endswith("only a restart of the server helps")
        assert client.get("/v2/health/live").json() == {"live": False}


def test_a_model_that_keeps_failing_looks_dead_after_the_time_that_is_set_and_no_longer_once_it_answers(
    model_folder: Path,
) -> None:
    server = ThreadedServer(create_app(Settings(model_checkpoint=model_folder, restart_after_s=1), stand_in()))
    with server.running() as client:
        _break(server, "out of order")
        for i in range(3):
            client.post("/predict", json={"text": text_of(i)})
        assert client.get("/readyz").status_code == 503
        assert client.get("/livez").status_code == 200
        wait_until(lambda: client.get("/livez").status_code == 503)
        assert "out of order" in client.get("/livez").json()["reason"]
        _break(server, None)
        wait_until(lambda: client.get("/livez").status_code == 200)


def _ask_and_wait_in_vain(server: Server) -> None:
    with suppress(httpx.TransportError):
        server.new_client().post("/predict", json={"text": text_of(1)})


@pytest.mark.parametrize(
    "command",
    [(), pytest.param(("uvicorn", "tests.inference.stand_in_server:app"), marks=pytest.mark.slow)],
    ids=["serve", "uvicorn"],
)
def test_a_process_whose_model_hangs_ends_with_a_code_of_its_own(
    model_folder: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    settings = {"RESTART_AFTER_S": "0.3", "GRACE_SECONDS": "0.5"}
    with stand_in_server(model_folder, tmp_path, 1000, command, **settings) as server:
        threading.Thread(target=_ask_and_wait_in_vain, args=[server], daemon=True).start()
        assert server.process.wait(timeout=30) == 70
        assert "so that a new one starts: the model has answered nothing for" in server.log()


def test_a_worker_whose_model_hangs_is_replaced_while_the_others_answer(model_folder: Path, tmp_path: Path) -> None:
    settings = {"RESTART_AFTER_S": "0.3", "GRACE_SECONDS": "0.5", "WORKERS": "2"}
    with stand_in_server(model_folder, tmp_path, 1000, **settings) as server:
        threading.Thread(target=_ask_and_wait_in_vain, args=[server], daemon=True).start()
        wait_until(lambda: "ended with exit code 70; another one replaces it" in server.log())
        wait_until(server.is_ready)


def test_a_client_with_a_text_that_the_model_cannot_take_takes_no_server_down(model_folder: Path) -> None:
    with serving(model_folder) as client:
        for _ in range(10):
            assert client.post("/predict", json={"text": RAISES}).status_code == 500
            assert client.get("/readyz").status_code == 200


def _refusal(load_model: Callable[[Path, str], ModelLoader], **settings: int) -> str:
    served = ServedModel(Settings(**settings), ServerMetrics(), load_model)
    with pytest.raises(ModelLoadError, match=r"^[^\n]+; [^\n]+$") as refusal:
        asyncio.run(served.load())
    assert served.error == str(refusal.value).replace(str(served.path), served.public_name)
    return str(refusal.value)


def test_a_model_that_reads_more_than_a_pass_may_hold_is_refused_with_the_setting_to_change(model_folder: Path) -> None:
    line = _refusal(lambda path, engine: StandInModel(model_folder), max_batch_tokens=16)
    assert "MAX_BATCH_TOKENS 16: one text of this model has up to 24 tokens" in line
    assert "set MAX_BATCH_TOKENS to at least 24" in line


def test_a_model_that_fails_to_load_in_an_unforeseen_way_is_refused_with_the_reason() -> None:
    def fail(path: Path, engine: str) -> ModelLoader:
        raise OverflowError("int too big to convert\nand more")

    assert "the model does not load (OverflowError: int too big to convert)" in _refusal(fail)


@pytest.mark.parametrize("path", ["/predict", "/predict/batch"])
def test_an_answered_request_leaves_nothing_to_the_garbage_collector(folder_copy: Path, path: str) -> None:
    # Under load, all requests would wait for the collector, for tens of milliseconds each time.
    body = {"text": text_of(1)} if path == "/predict" else {"texts": [text_of(1), text_of(2)]}
    with serving(folder_copy) as client:
        client.post(path, json=body)
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                assert client.post(path, json=body).status_code == 200
            wait_until(lambda: metric(client, "requests_in_progress") == 1)  # that of the metrics
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = [one for one in gc.garbage if type(one).__module__.startswith("inference.")]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert left == []
