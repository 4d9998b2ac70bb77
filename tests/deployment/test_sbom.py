"""`make sbom`, with a stand-in for the service that knows vulnerabilities."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deployment.image_context import ROOT
from deployment.write_sbom import LOCKS, SbomError, write_image_bill
from tests.http_servers import JsonHandler, served_answers
from tests.inference.servers import free_port

pytestmark = pytest.mark.skipif(
    find_spec("cyclonedx_py") is None or find_spec("pip_audit") is None,
    reason="cyclonedx-bom and pip-audit are not installed: pip install -e '.[dev]'",
)
FLAW = {
    "id": "PYSEC-2099-1",
    "summary": "reads more than it should",
    "affected": [{"package": {"name": "starlette", "ecosystem": "PyPI"}, "ranges": []}],
}


# The files of an image that tell what it holds, and some that do not.
STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.41-12+deb13u1
Description: GNU C Library
 Shared libraries

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""
VENV = "opt/venv/lib/python3.11/site-packages"
KERNELS = "app/inference/engines/native/_kernels.cpython-311-x86_64-linux-gnu.so"
ROOT_FILES = {
    "usr/lib/os-release": 'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nVERSION_ID="13"\nID=debian\n',
    "var/lib/dpkg/status": STATUS,
    "usr/local/include/python3.11/patchlevel.h": '#define PY_MAJOR_VERSION 3\n#define PY_VERSION      "3.11.16"\n',
    f"{VENV}/uvicorn-0.54.0.dist-info/METADATA": "Metadata-Version: 2.4\nName: uvicorn\nVersion: 0.54.0\n\nName: no\n",
    f"{VENV}/uvicorn/main.py": "",
    KERNELS: "machine code",
    "app/model/onnx/manifest.json": json.dumps({"source": {"weights_sha256": "ab" * 32}}),
}


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    for name, content in ROOT_FILES.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(content)
    return tmp_path / "root"


def test_the_bill_of_an_image_lists_its_system_its_interpreter_its_packages_its_kernels_and_its_model(
    tmp_path: Path,
) -> None:
    files = {name: content.encode() for name, content in ROOT_FILES.items()}
    counts = write_image_bill("news", files, tmp_path / "bill.json")
    bill = json.loads((tmp_path / "bill.json").read_text())
    components = {component["name"]: component for component in bill["components"]}
    assert counts == "1 Debian packages, 1 Python packages, 3 others"
    assert components["libc6"]["purl"] == "pkg:deb/debian/libc6@2.41-12%2Bdeb13u1?arch=amd64&distro=debian-13"
    assert components["python"]["cpe"].startswith("cpe:2.3:a:python:python:3.11.16:")
    assert components["uvicorn"]["purl"] == "pkg:pypi/uvicorn@0.54.0"
    assert components[KERNELS]["hashes"][0]["content"] == hashlib.sha256(b"machine code").hexdigest()
    assert components["app/model/onnx/manifest.json"]["hashes"][0]["content"] == "ab" * 32
    assert components["debian"]["version"] == "13"
    assert "gone" not in components
    _assert_valid(tmp_path / "bill.json")


def test_a_folder_that_is_no_root_of_an_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SbomError, match="no list of Debian's packages"):
        write_image_bill("empty", {}, tmp_path / "bill.json")


@pytest.mark.parametrize("source", ["rootfs", "docker"])
def test_one_command_lists_an_unpacked_image_and_one_that_an_engine_has(
    rootfs: Path, tmp_path: Path, source: str
) -> None:
    engine = tmp_path / "docker"
    engine.write_text(
        f'#!/bin/sh\n[ "$1" = export ] && exec tar -c -C {rootfs} .\necho "$*" | tee -a {tmp_path}/calls\n'
    )
    engine.chmod(0o755)
    flags = ("--rootfs", rootfs) if source == "rootfs" else ("--image", "news:1", "--builder", "docker")
    done = _write(tmp_path, "", *flags, path=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "1 Debian packages, 1 Python packages, 3 others" in done.stdout
    names = {component["name"] for component in json.loads((tmp_path / "image.cdx.json").read_text())["components"]}
    assert {"libc6", "python", "uvicorn", KERNELS} <= names
    if source == "docker":
        assert (tmp_path / "calls").read_text() == "create news:1\nrm create news:1\n"


@contextmanager
def _osv(flawed: str = "") -> Iterator[str]:
    """A service that knows one flaw in one package, if it knows any; its address."""

    def answer(request: JsonHandler) -> dict[str, Any]:
        return {"vulns": [FLAW]} if json.loads(request.body())["package"]["name"] == flawed else {}

    with served_answers(answer) as address:
        yield f"{address}/v1/query"


def _write(folder: Path, url: str, *flags: object, path: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "deployment/write_sbom.py", "--output", folder, "--osv_url", url, *map(str, flags)]
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_bill_lists_every_locked_package_with_version_and_hashes(tmp_path: Path) -> None:
    with _osv() as url:
        done = _write(tmp_path, url)
    assert done.returncode == 0, done.stderr
    assert "known vulnerabilities: 0" in done.stdout
    for lock in (path.stem for path in LOCKS):
        locked = set(re.findall(r"^([\w.-]+)==([^ ;]+)", (ROOT / f"deployment/{lock}.txt").read_text(), re.MULTILINE))
        bill = json.loads((tmp_path / f"{lock}.cdx.json").read_text())
        assert bill["bomFormat"] == "CycloneDX"
        assert {(component["name"], component["version"]) for component in bill["components"]} == locked
        for component in bill["components"]:
            (source,) = component["externalReferences"]
            assert source["hashes"], component["name"]


@pytest.mark.slow
def test_the_bill_is_valid_cyclonedx(tmp_path: Path) -> None:
    with _osv() as url:
        _write(tmp_path, url)
    _assert_valid(tmp_path / "requirements.cdx.json")


def _assert_valid(bill: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = bill.read_text()
    assert JsonStrictValidator(SchemaVersion.from_version(json.loads(text)["specVersion"])).validate_str(text) is None


@pytest.mark.slow
def test_a_known_vulnerability_is_named_and_ends_with_exit_code_1(tmp_path: Path) -> None:
    with _osv("starlette") as url:
        done = _write(tmp_path, url)
    assert done.returncode == 1, done.stderr
    assert re.search(r"known vulnerabilities: 1\nstarlette \S+: PYSEC-2099-1\n", done.stdout)


@pytest.mark.slow
def test_without_the_service_the_bills_are_written_and_one_line_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text("of an earlier run")
    done = _write(tmp_path, f"http://127.0.0.1:{free_port()}/v1/query")
    assert done.returncode == 2
    assert len(list(tmp_path.glob("*.cdx.json"))) == len(LOCKS)
    assert not (tmp_path / "audit.json").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "the vulnerability service cannot be reached" in line
