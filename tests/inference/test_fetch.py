"""`python -m inference.fetch` as a process: from a folder, over HTTP, from the hub's stand-in and from a bucket."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec
import pytest

from common.errors import UserError
from common.model_folder import verified_manifest
from inference.model_sources import source_at
from tests.deployment.hub_contents import Hub, Repository
from tests.deployment.small_model import write_cascade, write_small_model
from tests.deployment.stand_in_hub import READER, running_hub
from tests.http_servers import JsonHandler, served
from tests.inference.conftest import StartServer
from tests.inference.servers import free_port
from tests.training.checkpointing.s3_server import CREDENTIALS, s3_server

REPOSITORY = Path(__file__).resolve().parents[2]
NEWS = REPOSITORY / "checkpoints" / "news"
SECRET = "secret-of-the-source"


class FileServer:
    """Serves a folder over HTTP, as `answer` decides; keeps each path that was asked for, with its token."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, ""
        self.asked: list[tuple[str, str | None]] = []
        self.answer: Callable[[JsonHandler], bool] = lambda request: False  # whether it has answered

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


@contextmanager
def file_server(folder: Path, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> Iterator[FileServer]:
    files = FileServer(folder)

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            files.asked.append((self.path, self.headers.get("Authorization")))
            if files.answer(self):
                return
            path = files.folder / self.path.lstrip("/")
            self.send(200, path.read_bytes()) if path.is_file() else self.send(404, b"")

    with served(Handler, tls, host) as files.address:
        yield files


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the artefact that comes with the repository."""
    return Path(shutil.copytree(NEWS, tmp_path / "source" / "news"))


@pytest.fixture
def files(source: Path) -> Iterator[FileServer]:
    with file_server(source.parent) as server:
        yield server


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "model"


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "inference.fetch", *map(str, arguments)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "FETCH_", "AWS_"))}
    env = {**inherited, "PYTHONPATH": str(REPOSITORY), "NO_PROXY": "127.0.0.1", **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def fetch(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    process = start(*arguments, **environment)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def refusal(done: subprocess.CompletedProcess[str], target: Path, code: int = 2) -> str:
    """The one line of a failed command, which has left nothing behind."""
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    assert not target.exists()
    assert not list(target.parent.glob(f".{target.name}.*.tmp"))
    return done.stderr


def test_an_artefact_is_fetched_whole_and_serves(files: FileServer, target: Path, start_server: StartServer) -> None:
    done = fetch(f"{files.address}/news/", target)

    assert done.returncode == 0, done.stderr
    assert {path.name for path in target.iterdir()} == {path.name for path in NEWS.iterdir()} - {
        "README.md",
        "seen_texts.bin",
    }
    verified_manifest(target, None)
    with start_server(target) as client:
        assert client.post("/predict", json={"text": "Goal!"}).status_code == 200


def test_a_model_folder_is_fetched_with_its_artefacts_and_without_its_weights(tmp_path: Path, target: Path) -> None:
    model = write_small_model(tmp_path / "source" / "model")

    done = fetch(model, target)

    assert done.returncode == 0, done.stderr
    verified_manifest(target / "onnx", target)
    assert not (target / "model.safetensors").exists()
    assert (target / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert "is already there" in fetch(model, target).stdout


def test_a_cascade_is_fetched_with_both_of_its_models_or_not_at_all(tmp_path: Path, target: Path) -> None:
    cascade = write_cascade(write_small_model(tmp_path / "model"), tmp_path / "cascade")
    assert fetch(cascade, target).returncode == 0
    for folder in ("", "small"):
        names = {path.name for path in (cascade / folder).iterdir()}
        assert {path.name for path in (target / folder).iterdir()} == names
        assert verified_manifest(target / folder, None) == verified_manifest(cascade / folder, None)
    assert "is already there" in fetch(cascade, target).stdout
    pin = hashlib.sha256((cascade / "manifest.json").read_bytes()).hexdigest()
    assert "is already there" in fetch("/gone", target, "--manifest_sha256", pin).stdout
    (target / "small" / "model.onnx").write_bytes(b"damaged")
    assert fetch(cascade, target, "--manifest_sha256", pin).returncode == 0
    assert verified_manifest(target / "small", None)

    with (cascade / "small" / "manifest.json").open("a") as manifest:
        manifest.write(" ")
    other = target.with_name("other")
    assert "is not the small model that this cascade was certified with" in refusal(fetch(cascade, other), other)
    (cascade / "small" / "manifest.json").unlink()
    assert "small/manifest.json: is missing" in refusal(fetch(cascade, other), other)


def test_what_is_there_already_is_not_fetched_again(files: FileServer, target: Path) -> None:
    fetch(f"{files.address}/news", target)
    files.asked.clear()

    done = fetch(f"{files.address}/news", target)

    assert done.returncode == 0
    assert "is already there" in done.stdout
    assert files.paths() == ["/news/manifest.json"]


def test_a_model_with_a_pinned_manifest_that_is_there_needs_no_source(files: FileServer, target: Path) -> None:
    pin = hashlib.sha256((NEWS / "manifest.json").read_bytes()).hexdigest()
    fetch(f"{files.address}/news", target, "--manifest_sha256", pin)
    files.asked.clear()

    done = fetch("https://host.invalid/news", target, "--manifest_sha256", pin.upper())

    assert done.returncode == 0, done.stderr
    assert files.asked == []


def test_a_damaged_copy_is_replaced(files: FileServer, target: Path) -> None:
    fetch(f"{files.address}/news", target)
    (target / "tokenizer.json").write_text("{}")

    done = fetch(f"{files.address}/news", target)

    assert done.returncode == 0, done.stderr
    verified_manifest(target, None)


def test_a_manifest_other_than_the_pinned_one_is_refused(files: FileServer, target: Path) -> None:
    line = refusal(fetch(f"{files.address}/news", target, "--manifest_sha256", "0" * 64), target)

    assert "its SHA-256 is" in line
    assert line.endswith("[model-unusable]\n")


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "SHA-256 differs"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "more than the 7,760,680 bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "SHA-256 differs"),
        (lambda path: path.unlink(), "is missing"),
    ],
    ids=["changed", "longer", "shorter", "missing"],
)
def test_files_other_than_the_manifest_says_leave_no_folder(
    files: FileServer, target: Path, damage: Callable[[Path], object], word: str
) -> None:
    damage(files.folder / "news" / "model_int8.safetensors")

    line = refusal(fetch(f"{files.address}/news", target), target)

    assert f"{files.address}/news/model_int8.safetensors: " in line
    assert word in line
    assert line.endswith("[model-unusable]\n")


def test_a_refused_model_leaves_the_one_that_was_there(files: FileServer, target: Path, tmp_path: Path) -> None:
    fetch(NEWS, target)
    manifest = files.folder / "news" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"options"', '"unknown": 1, "options"'))
    (files.folder / "news" / "config.json").write_text("{}")

    done = fetch(f"{files.address}/news", target)

    assert done.returncode == 2
    verified_manifest(target, None)


@pytest.mark.parametrize("name", ["../outside", "/outside", "..", "", "a\\b", "manifest.json", ".hidden"])
def test_a_manifest_cannot_name_a_file_outside_its_folder(source: Path, target: Path, name: str) -> None:
    content = json.loads((source / "manifest.json").read_text())
    content["files"][name] = content["files"]["config.json"]
    (source / "manifest.json").write_text(json.dumps(content))

    assert f"{name!r} is not a file with a size" in refusal(fetch(source, target), target)


def test_a_model_larger_than_allowed_is_refused_before_it_is_fetched(files: FileServer, target: Path) -> None:
    line = refusal(fetch(f"{files.address}/news", target, "--most_gb", "0.001"), target)

    assert "--most_gb 0.001" in line
    assert files.paths() == ["/news/manifest.json"]


def test_a_page_instead_of_a_manifest_is_refused_by_its_address(files: FileServer, target: Path) -> None:
    (files.folder / "news" / "manifest.json").write_text("<html>")

    assert refusal(fetch(f"{files.address}/news", target), target).startswith(
        f"error: {files.address}/news/manifest.json:"
    )


def test_a_manifest_without_end_is_refused(files: FileServer, target: Path) -> None:
    (files.folder / "news" / "manifest.json").write_bytes(b" " * (5 << 20))

    assert "which no manifest has" in refusal(fetch(f"{files.address}/news", target), target)


def test_a_server_that_is_busy_or_hangs_up_is_asked_again(files: FileServer, target: Path) -> None:
    def answer(request: JsonHandler) -> bool:
        if files.paths().count(request.path) > 1:
            return False
        if request.path.endswith("config.json"):
            request.send(503, b"")
            return True
        if request.path.endswith("tokenizer.json"):
            request.send(200, b"{", {"Content-Length": "194906"})
            request.close_connection = True
            return True
        return False

    files.answer = answer

    done = fetch(f"{files.address}/news", target)

    assert done.returncode == 0, done.stderr
    assert "answered 503; next attempt in 1 s" in done.stdout
    assert "the connection ended after 1 of 194,906 bytes; next attempt in 1 s" in done.stdout
    verified_manifest(target, None)


def test_a_source_that_does_not_answer_in_time_ends_with_1(files: FileServer, target: Path) -> None:
    files.answer = lambda request: request.send(503, b"") is None

    line = refusal(fetch(f"{files.address}/news", target, "--timeout_s", "0.5"), target, code=1)

    assert line.endswith("answered 503 [fetch-unreachable]\n")


def test_a_driver_that_cannot_connect_ends_with_1_and_does_not_blame_the_folder(target: Path) -> None:
    line = refusal(fetch(f"ftp://127.0.0.1:{free_port()}/news", target), target, code=1)

    assert "/news: cannot be read (" in line


def test_a_token_goes_to_the_source_and_to_no_other_host(files: FileServer, target: Path, tmp_path: Path) -> None:
    with file_server(files.folder) as elsewhere:

        def answer(request: JsonHandler) -> bool:
            if "safetensors" in request.path:
                request.send(302, b"", {"Location": f"{elsewhere.address}{request.path}"})
            elif request.path == "/news/tokenizer.json":
                request.send(307, b"", {"Location": "/moved/tokenizer.json"})
            return request.path in ("/news/model_int8.safetensors", "/news/tokenizer.json")

        (files.folder / "moved").symlink_to("news")
        files.answer = answer
        done = fetch(f"{files.address}/news", target, FETCH_TOKEN=SECRET)

        assert done.returncode == 0, done.stderr
        assert {token for _, token in files.asked} == {f"Bearer {SECRET}"}
        assert elsewhere.asked == [("/news/model_int8.safetensors", None)]
        assert SECRET not in done.stdout + done.stderr


def test_a_refused_token_ends_with_2_and_names_the_variable(files: FileServer, target: Path) -> None:
    files.answer = lambda request: request.send(403, b"") is None

    assert "answered 403; check the address and the token" in refusal(fetch(f"{files.address}/news", target), target)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    path = tmp_path / "certificate.pem"
    name = ("-subj", "/CN=source", "-addext", "subjectAltName=IP:127.0.0.1")
    key = ("-newkey", "rsa:2048", "-nodes", "-keyout", str(path), "-out", str(tmp_path / "public.pem"), "-days", "2")
    subprocess.run(["openssl", "req", "-x509", *name, *key], check=True, capture_output=True)
    path.write_text(path.read_text() + (tmp_path / "public.pem").read_text())
    return path


def test_https_needs_a_known_certificate_and_never_falls_back_to_http(
    source: Path, files: FileServer, target: Path, certificate: Path
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    with file_server(source.parent, tls) as secure:
        unknown = fetch(f"{secure.address}/news", target, "--timeout_s", "0.5")
        assert "CERTIFICATE_VERIFY_FAILED" in refusal(unknown, target, code=1)
        known = {"SSL_CERT_FILE": str(certificate.with_name("public.pem"))}
        assert fetch(f"{secure.address}/news", target, **known).returncode == 0

        shutil.rmtree(target)
        secure.answer = lambda request: request.send(302, b"", {"Location": files.address + request.path}) is None
        line = refusal(fetch(f"{secure.address}/news", target, **known), target)
        assert "redirected from https to http" in line
        assert files.asked == []


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("http://models.example.org/news", "anyone on the network path could change"),
        ("https://user:secret@models.example.org/news", "a token comes from FETCH_TOKEN"),
        ("https://models.example.org/news?signature=secret", "no user, query or fragment"),
        ("https:///news", "not an address"),
        ("https://models.example.org:port/news", "not an address"),
        ("hf://news", "write hf://owner/name"),
        ("hf://alice/../news", "write hf://owner/name"),
        ("ftps://models.example.org/news", "Protocol not known"),
        ("gone", "has no manifest.json"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_in_one_line(address: str, word: str, target: Path) -> None:
    line = refusal(fetch(address, target), target)

    assert word in line
    assert "secret" not in line


def test_a_bucket_without_its_driver_names_the_extra(tmp_path: Path, target: Path) -> None:
    (tmp_path / "without" / "s3fs").mkdir(parents=True)
    (tmp_path / "without" / "s3fs" / "__init__.py").write_text("raise ImportError('Install s3fs')")
    path = f"{tmp_path / 'without'}{os.pathsep}{REPOSITORY}"

    line = refusal(fetch("s3://bucket/news", target, PYTHONPATH=path), target)

    assert line.endswith('pip install "distrinews[s3]" [package-missing]\n')


def test_a_folder_with_something_else_in_it_is_kept(target: Path) -> None:
    target.mkdir(parents=True)
    (target / "thesis.txt").write_text("years of work")

    done = fetch(NEWS, target)

    assert done.returncode == 2
    assert "holds something other" in done.stderr
    assert (target / "thesis.txt").read_text() == "years of work"


def test_a_link_to_a_model_and_the_model_stay_as_they_are(target: Path) -> None:
    first = target.with_name("first")
    assert fetch(NEWS, first).returncode == 0
    first.joinpath("manifest.json").write_text("{}")
    target.symlink_to("first")

    done = fetch(NEWS, target)

    assert done.returncode == 2
    assert "is a symbolic link to first; fetch into a new folder, then let the link lead there" in done.stderr
    assert target.is_symlink()
    assert (first / "manifest.json").read_text() == "{}"


def test_what_a_killed_process_left_is_cleared_by_the_next(files: FileServer, target: Path) -> None:
    half_way = threading.Event()

    def answer(request: JsonHandler) -> bool:
        if "safetensors" not in request.path:
            return False
        half_way.set()
        return request.send(200, b"x", {"Content-Length": "7760680"}) is None  # and no more

    files.answer = answer
    process = start(f"{files.address}/news", target)
    assert half_way.wait(60)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not target.exists()
    assert list(target.parent.glob(".model.*.tmp"))

    files.answer = lambda request: False
    done = fetch(f"{files.address}/news", target)

    assert done.returncode == 0, done.stderr
    assert not list(target.parent.glob(".model.*.tmp"))


def test_of_two_processes_one_fetches_and_the_other_finds_it_there(files: FileServer, target: Path) -> None:
    processes = [start(f"{files.address}/news", target) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in processes]

    assert [process.returncode for process in processes] == [0, 0]
    assert sum("is already there" in out for out in said) == 1
    assert files.paths().count("/news/model_int8.safetensors") == 1


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with a private model as `training.publish_model` uploads it."""
    model = write_small_model(tmp_path / "published")
    names = [path.relative_to(model).as_posix() for path in model.rglob("*") if path.is_file()]
    repository = Repository("models", "alice/news", private=True)
    repository.files = {name: (model / name).read_bytes() for name in names}
    with running_hub(Hub(repositories={("models", "alice/news"): repository})) as hub:
        yield hub


@pytest.mark.parametrize("address", ["hf://alice/news", "hf://alice/news@main/onnx"])
def test_a_model_of_the_hub_comes_from_one_commit(address: str, hub: Hub, target: Path) -> None:
    done = fetch(address, target, HF_ENDPOINT=hub.address, HF_TOKEN=READER)

    assert done.returncode == 0, done.stderr
    verified_manifest(target if address.endswith("onnx") else target / "onnx", None)
    head = hub.repository("models", "alice/news").head
    assert hub.asked[-1].startswith(f"GET /alice/news/resolve/{head}/onnx/")
    assert READER not in done.stdout + done.stderr


def test_a_hub_that_redirects_to_its_own_cache_still_says_which_commit_it_was(files: FileServer, target: Path) -> None:
    commit = "a1" * 20
    (files.folder / "cache").symlink_to("news")

    def answer(request: JsonHandler) -> bool:
        if not request.path.startswith("/alice/news/resolve/"):
            return False
        where = {"Location": f"/cache/{request.path.rsplit('/', 1)[1]}", "X-Repo-Commit": commit}
        return request.send(307, b"", where) is None

    files.answer = answer
    done = fetch("hf://alice/news@refs%2Fpr%2F1", target, HF_ENDPOINT=files.address, HF_TOKEN=SECRET)

    assert done.returncode == 0, done.stderr
    asked = [path for path in files.paths() if path.startswith("/alice")]
    assert asked[0] == "/alice/news/resolve/refs%2Fpr%2F1/manifest.json"
    assert len(asked) > 1
    assert all(path.startswith(f"/alice/news/resolve/{commit}/") for path in asked[1:])
    assert {token for _, token in files.asked} == {f"Bearer {SECRET}"}


def test_a_private_model_of_the_hub_needs_the_token(hub: Hub, target: Path) -> None:
    line = refusal(fetch("hf://alice/news", target, HF_ENDPOINT=hub.address, HF_HOME=str(target.parent)), target)

    assert "hf://alice/news: has no manifest.json" in line


@pytest.mark.slow
def test_a_model_is_fetched_from_a_bucket(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as port:
        store = CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        for name, value in store.items():
            monkeypatch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        bucket = fsspec.filesystem("s3")
        bucket.mkdir("bucket")
        bucket.put(f"{NEWS}/", "bucket/news/", recursive=True)

        done = fetch("s3://bucket/news", target, **store)
        gone = fetch("s3://bucket/gone", target.with_name("other"), **store)

    assert done.returncode == 0, done.stderr
    verified_manifest(target, None)
    assert "has no manifest.json" in refusal(gone, target.with_name("other"))


def test_a_token_with_a_line_break_around_it_is_sent_without(files: FileServer, target: Path) -> None:
    done = fetch(f"{files.address}/news", target, FETCH_TOKEN=f" {SECRET}\n")

    assert done.returncode == 0, done.stderr
    assert {token for _, token in files.asked} == {f"Bearer {SECRET}"}


@pytest.mark.parametrize("inside", ["\n", "\r", "\r\n x: ", "\x01", "\x1b[2J", "\u2026"])
@pytest.mark.parametrize(
    ("variable", "address"), [("FETCH_TOKEN", "https://host.invalid/news"), ("HF_TOKEN", "hf://alice/news")]
)
def test_a_token_that_no_header_can_carry_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, address: str, inside: str
) -> None:
    monkeypatch.setenv(variable, f"secret{inside}token")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # which the serving image does not have

    with pytest.raises(UserError) as refused:
        source_at(address, is_pinned=False)

    assert refused.value.line.startswith(f"{variable}: ")
    assert "secret" not in refused.value.line.removesuffix("[secret-unusable]")


def test_an_answer_that_http_does_not_allow_is_not_quoted(files: FileServer, target: Path) -> None:
    def answer(request: JsonHandler) -> bool:
        return request.send(200, b"{}", {"Content-Length": "signature"}) is None

    files.answer = answer

    line = refusal(fetch(f"{files.address}/news", target, "--timeout_s", "0.9"), target, code=1)

    assert "signature" not in line


@pytest.mark.parametrize("answers", ["nothing", "a header without end", "many empty files"])
def test_the_time_is_a_bound_for_the_whole_fetch(files: FileServer, target: Path, answers: str) -> None:
    gone = threading.Event()

    def answer(request: JsonHandler) -> bool:
        if answers == "a header without end":
            with suppress(OSError):
                while not gone.wait(0.05):
                    request.wfile.write(b"X")
        elif answers == "nothing":
            gone.wait()
        elif request.path.endswith("manifest.json"):
            return False
        else:
            gone.wait(0.4)
            return request.send(200, b"") is None
        request.close_connection = True
        return True

    if answers == "many empty files":
        manifest = files.folder / "news" / "manifest.json"
        content = json.loads(manifest.read_text())
        content["files"] |= {f"file_{number}": {"bytes": 0, "sha256": "0" * 64} for number in range(100)}
        manifest.write_text(json.dumps(content))
    files.answer = answer
    try:
        line = refusal(fetch(f"{files.address}/news", target, "--timeout_s", "2"), target, code=1)
    finally:
        gone.set()

    assert line == f"error: {files.address}/news: not complete within --timeout_s 2 [fetch-unreachable]\n"


@pytest.mark.parametrize("number", ["1e300", "1e9"])
def test_a_time_longer_than_the_system_can_count_is_none(target: Path, number: str) -> None:
    assert fetch(NEWS, target, "--timeout_s", number).returncode == 0


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("169.254.169.254", "link-local"),
        ("2852039166", "link-local"),
        ("0251.0376.0251.0376", "link-local"),
        ("0xa9fea9fe", "link-local"),
        ("169.16689662", "link-local"),
        ("[::ffff:169.254.169.254]", "link-local"),
        ("[64:ff9b::a9fe:a9fe]", "link-local"),
        ("[2002:a9fe:a9fe::]", "link-local"),
        ("[fe80::1]", "link-local"),
        ("169.254.169.254.", "link-local"),
        ("localhost", "loopback"),
        ("models.localhost.", "loopback"),
        ("127.1", "loopback"),
        ("0.0.0.0", "loopback"),
        ("[::1]", "loopback"),
        ("10.0.0.1", "private"),
        ("100.100.100.200", "private"),
        ("[fd00:ec2::254]", "private"),
        ("192.0.0.192", "private"),
        ("[fec0::1]", "private"),
        ("[64:ff9b:1::a9fe:a9fe]", "private"),
        ("[::ffff:0:a9fe:a9fe]", "private"),
        ("[::a9fe:a9fe]", "private"),
    ],
)
def test_a_public_source_cannot_redirect_to_an_internal_address(
    files: FileServer, target: Path, host: str, kind: str
) -> None:
    # The stand-in is the proxy that everything is asked through, and so the public source, too.
    files.answer = lambda request: request.send(302, b"", {"Location": f"http://{host}/latest"}) is None
    pin = ("--manifest_sha256", "0" * 64)

    done = fetch("http://models.example.org/news", target, *pin, http_proxy=files.address, NO_PROXY="")

    line = refusal(done, target)
    assert f", a {kind} address, which is not followed from a public one" in line
    assert files.paths() == ["http://models.example.org/news/manifest.json"]


def test_a_name_that_leads_to_an_internal_address_is_not_asked_either(source: Path, target: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing, but finds the address of this machine
        own = probe.getsockname()[0]
    if own.startswith("127."):
        pytest.skip("this machine has no address but the loopback")
    with file_server(source.parent, host=own) as outer, file_server(source.parent) as inner:
        where = inner.address.replace("127.0.0.1", "localhost")
        outer.answer = lambda request: request.send(302, b"", {"Location": where + request.path}) is None

        line = refusal(fetch(f"{outer.address}/news", target, "--manifest_sha256", "0" * 64, NO_PROXY="*"), target)

        assert "redirected to 127.0.0.1, a loopback address" in line
        assert inner.asked == []


def test_what_others_put_in_the_way_is_not_written_to(files: FileServer, target: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("mine")
    target.parent.mkdir(parents=True)
    for name in (".model.fetching", ".model.old", ".model.tmp", ".model.abcd1234.tmp"):
        (target.parent / name).symlink_to(elsewhere)

    done = fetch(f"{files.address}/news", target)

    assert done.returncode == 0, done.stderr
    assert target.is_dir()
    assert not target.is_symlink()
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == {"config.json": "mine"}


def test_a_lock_that_is_a_link_is_refused(target: Path, tmp_path: Path) -> None:
    target.parent.mkdir(parents=True)
    (target.parent / ".model.lock").symlink_to(tmp_path / "new")

    assert "[not-writable]" in refusal(fetch(NEWS, target), target)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "address", ["https://alice:secret@host:port/news", "hf://alice:secret@host/..", "https://host:port/x?secret"]
)
def test_an_address_that_is_no_address_is_shown_without_its_password(address: str, target: Path) -> None:
    assert "secret" not in refusal(fetch(address, target), target)
