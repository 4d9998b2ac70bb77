"""`make sbom`, with a stand-in for the service that knows vulnerabilities."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import pytest

from deployment.image_context import ROOT
from tests.inference.servers import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("cyclonedx_py") is None or find_spec("pip_audit") is None,
        reason="cyclonedx-bom and pip-audit are not installed: pip install -e '.[dev]'",
    ),
]
FLAW = {
    "id": "PYSEC-2099-1",
    "summary": "reads more than it should",
    "affected": [{"package": {"name": "starlette", "ecosystem": "PyPI"}, "ranges": []}],
}


class _Osv(ThreadingHTTPServer):
    """Knows one flaw in one package, if it knows any."""

    flawed: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/query"


class _Answer(BaseHTTPRequestHandler):
    server: _Osv

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"vulns": [FLAW]} if query["package"]["name"] == self.server.flawed else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep the tests' output quiet."""


@pytest.fixture
def osv() -> Iterator[_Osv]:
    with _Osv(("127.0.0.1", 0), _Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def _write(folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "deployment/write_sbom.py", "--output", folder, "--osv_url", url]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_bill_lists_every_locked_package_with_version_and_hashes(osv: _Osv, tmp_path: Path) -> None:
    done = _write(tmp_path, osv.url)
    assert done.returncode == 0, done.stderr
    assert "known vulnerabilities: 0" in done.stdout
    for lock in ("requirements", "requirements-torch", "requirements-torch-cuda"):
        locked = set(re.findall(r"^([\w.-]+)==([^ ;]+)", (ROOT / f"deployment/{lock}.txt").read_text(), re.MULTILINE))
        bill = json.loads((tmp_path / f"{lock}.cdx.json").read_text())
        assert bill["bomFormat"] == "CycloneDX"
        assert {(component["name"], component["version"]) for component in bill["components"]} == locked
        for component in bill["components"]:
            (source,) = component["externalReferences"]
            assert source["hashes"], component["name"]


def test_the_bill_is_valid_cyclonedx(osv: _Osv, tmp_path: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    _write(tmp_path, osv.url)
    bill = (tmp_path / "requirements.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.from_version(json.loads(bill)["specVersion"])).validate_str(bill) is None


def test_a_known_vulnerability_is_named_and_ends_with_exit_code_1(osv: _Osv, tmp_path: Path) -> None:
    osv.flawed = "starlette"
    done = _write(tmp_path, osv.url)
    assert done.returncode == 1, done.stderr
    assert re.search(r"known vulnerabilities: 1\nstarlette \S+: PYSEC-2099-1\n", done.stdout)


def test_without_the_service_the_bills_are_written_and_one_line_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text("of an earlier run")
    done = _write(tmp_path, f"http://127.0.0.1:{free_port()}/v1/query")
    assert done.returncode == 2
    assert len(list(tmp_path.glob("*.cdx.json"))) == 3
    assert not (tmp_path / "audit.json").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "the vulnerability service cannot be reached" in line
