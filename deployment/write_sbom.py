"""Write a CycloneDX bill of materials.

python deployment/write_sbom.py [--output build/sbom]: of each lock, and one audit for known
vulnerabilities. Exit code 0: no vulnerability is known; 1: at least one is; 2: not audited.

python deployment/write_sbom.py --image NAME | --rootfs FOLDER: of all that is in a built image, or
in the folder of an unpacked one: Debian's packages, CPython, Python's packages, the compiled
kernels and the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from email.parser import BytesParser, Parser
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

# A script finds only its own folder by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import OneLineParser, UserError, run_command
from deployment.build_image import BUILDERS, find_builder
from deployment.image_context import EXTRAS, ROOT

_PARTS = ("", "-torch", "-torch-cuda", "-uv", *(f"-with-{extra}" for extra in EXTRAS))
LOCKS = [ROOT / "deployment" / f"requirements{part}.txt" for part in _PARTS]
# The files of an image that say what is in it, or that no package manager knows.
_TELLING = re.compile(
    r"var/lib/dpkg/status(\.d/[^/]+)?|usr/lib/os-release|usr/local/include/python3[^/]+/patchlevel\.h"
    r"|.+\.dist-info/METADATA|app/inference/engines/native/_kernels[^/]*\.so|app/model/([^/]+/)?manifest\.json"
)
Component = dict[str, Any]


class SbomError(UserError): ...


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("build/sbom"), help="default: build/sbom"
    )
    parser.add_argument("--osv_url", help="an OSV service to ask instead of the public one")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--image", help="a built image, to list all that is in it")
    what.add_argument("--rootfs", type=Path, help="the same for an unpacked image")
    parser.add_argument(
        "--builder",
        choices=BUILDERS,
        help="the program that has the image; default: the first that answers",
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.image or options.rootfs:
        bill = options.output / "image.cdx.json"
        if options.image:
            files = dict(_of_image(options.image, options.builder or find_builder()))
        else:
            files = dict(_of_folder(options.rootfs))
        counts = write_image_bill(options.image or str(options.rootfs), files, bill)
        print(f"Written: {bill} ({counts})", flush=True)
        return 0
    for lock in LOCKS:
        bill = options.output / f"{lock.stem}.cdx.json"
        write_bill(lock, bill)
        print(f"Written: {bill}", flush=True)
    packages = audit(LOCKS, options.output / "audit.json", options.osv_url)
    found = [
        f"{package['name']} {package['version']}: {flaw['id']}"
        for package in packages
        for flaw in package["vulns"]
    ]
    print(
        "\n".join(
            [f"{len(packages)} packages audited, known vulnerabilities: {len(found)}", *found]
        )
    )
    return 1 if found else 0


def write_bill(lock: Path, target: Path) -> None:
    """Write the CycloneDX list of a lock's packages with their hashes."""
    described = [
        "--output-reproducible",
        "--no-validate",
        "--pyproject",
        str(ROOT / "pyproject.toml"),
    ]
    _run(
        ["cyclonedx_py", "requirements", *described, "--output-file", str(target), str(lock)],
        target,
    )


def write_image_bill(name: str, files: dict[str, bytes], target: Path) -> str:
    """Write the CycloneDX list of all that `files` tell of; returns how much of each kind there is.

    Raises:
        SbomError: they tell of no system.
    """
    system = dict(
        re.findall(
            r'^(\w+)="?([^"\n]*)', files.get("usr/lib/os-release", b"").decode(), re.MULTILINE
        )
    )
    debian = [
        component
        for path in files
        if "dpkg/status" in path
        for component in _debian(files[path], system)
    ]
    if not debian:
        raise SbomError(
            f"{name}: holds no list of Debian's packages; is it the root of an image?",
            code="sbom-incomplete",
        )
    python = [_python(content) for path, content in files.items() if path.endswith("/METADATA")]
    other = [found for path, content in files.items() if (found := _other(path, content))]
    components = sorted((*debian, *python, *other), key=lambda component: component["bom-ref"])
    # A package may lie in an image twice, and the schema wants each reference once.
    unique = {component["bom-ref"]: component for component in components}
    described = {
        "type": "operating-system",
        "name": system["ID"],
        "version": system.get("VERSION_ID", ""),
    }
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": name, "bom-ref": name}},
        "components": [{**described, "bom-ref": "system"}, *unique.values()],
    }
    target.write_text(json.dumps(bill, indent=2) + "\n")
    return f"{len(debian)} Debian packages, {len(python)} Python packages, {len(other)} others"


def _debian(status: bytes, system: dict[str, str]) -> Iterator[Component]:
    for paragraph in status.decode().strip().split("\n\n"):
        package = Parser().parsestr(paragraph, headersonly=True)
        # The list keeps packages that were removed, with another status. Images without a package
        # manager have a file for each package, which states none.
        if "installed" in package.get("Status", "installed").split():
            where = {
                "arch": package["Architecture"],
                "distro": f"{system['ID']}-{system.get('VERSION_ID', '')}",
            }
            yield _component(
                "library", package["Package"], package["Version"], "deb", system["ID"], where
            )


def _python(metadata: bytes) -> Component:
    package = BytesParser().parsebytes(metadata, headersonly=True)
    # Normalised as PEP 503 says: two spellings of one name would otherwise be two packages.
    return _component(
        "library", re.sub(r"[-_.]+", "-", package["Name"]).lower(), package["Version"], "pypi"
    )


def _other(path: str, content: bytes) -> Component | None:
    if path.endswith("/patchlevel.h"):  # an interpreter that Debian does not know
        version = re.findall(rb'define PY_VERSION\s+"([^"]+)"', content)[0].decode()
        return _component("application", "python", version, "generic") | {
            "cpe": f"cpe:2.3:a:python:python:{version}:*:*:*:*:*:*:*"
        }
    if path.endswith(".so"):
        sha256 = hashlib.sha256(content).hexdigest()
        return {
            "type": "file",
            "name": path,
            "bom-ref": path,
            "hashes": [{"alg": "SHA-256", "content": sha256}],
        }
    if path.endswith("/manifest.json"):
        sha256 = json.loads(content)["source"]["weights_sha256"]
        # Of the weights that the artefact was made from, which its card and its run have, too.
        hashes = [{"alg": "SHA-256", "content": sha256}]
        return {"type": "machine-learning-model", "name": path, "bom-ref": path, "hashes": hashes}
    return None


def _component(
    kind: str,
    name: str,
    version: str,
    ecosystem: str,
    namespace: str = "",
    where: dict[str, str] | None = None,
) -> Component:
    place = "/".join(part for part in (ecosystem, namespace, quote(name, safe="")) if part)
    purl = f"pkg:{place}@{quote(version, safe=':')}" + (f"?{urlencode(where)}" if where else "")
    return {"type": kind, "name": name, "version": version, "purl": purl, "bom-ref": purl}


def _of_folder(root: Path) -> Iterator[tuple[str, bytes]]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name).relative_to(root).as_posix()
            if _TELLING.fullmatch(path):
                yield path, Path(folder, name).read_bytes()


def _of_image(image: str, builder: str) -> Iterator[tuple[str, bytes]]:
    made = ["from", "--pull-never"] if builder == "buildah" else ["create"]
    container = _output(builder, *made, image)
    try:
        if builder == "buildah":
            yield from _of_folder(Path(_output(builder, "mount", container)))
            return
        # Read as it comes: a whole image would fill the disk a second time.
        with (
            subprocess.Popen([builder, "export", container], stdout=subprocess.PIPE) as export,
            tarfile.open(fileobj=export.stdout, mode="r|") as root,
        ):
            for member in root:
                path = member.name.removeprefix("./")
                if (
                    member.isfile()
                    and _TELLING.fullmatch(path)
                    and (file := root.extractfile(member))
                ):
                    yield path, file.read()
    finally:
        _output(builder, "rm", container)


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        what = " ".join(command)
        raise SbomError(
            f"{what} failed ({done.stderr.strip().splitlines()[-1:]})", code="sbom-incomplete"
        )
    return done.stdout.strip()


def audit(locks: list[Path], target: Path, osv_url: str | None) -> list[dict[str, Any]]:
    """Query the known vulnerabilities of all locked packages; returns each package with its own."""
    command = [
        "pip_audit",
        "--disable-pip",
        "--require-hashes",
        "--format",
        "json",
        "--progress-spinner",
        "off",
    ]
    service = ["--vulnerability-service", "osv", *(["--osv-url", osv_url] if osv_url else [])]
    requirements = [word for lock in locks for word in ("--requirement", str(lock))]
    _run([*command, *service, *requirements, "--output", str(target)], target)
    packages = json.loads(target.read_text())["dependencies"]
    # The tool itself counts what it could not look up as harmless.
    if skipped := [package["name"] for package in packages if "skip_reason" in package]:
        raise SbomError(
            f"{target}: not audited: {', '.join(skipped)}; the file says why",
            code="sbom-incomplete",
        )
    return packages


def _run(command: list[str], target: Path) -> None:
    # What an earlier run wrote must not pass for this one's; and no exit code tells a finding from
    # a failure.
    target.unlink(missing_ok=True)
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    if target.exists():
        return
    last = ([line for line in done.stderr.splitlines() if line.strip()] or ["no output"])[-1]
    if "No module named" in last:
        raise SbomError(
            f"{last}; install the tools with pip install -e '.[dev]'", code="package-missing"
        )
    if "ConnectionError" in last:
        raise SbomError(
            f"{target}: not written, the vulnerability service cannot be reached; the bills are "
            "complete",
            code="sbom-incomplete",
        )
    raise SbomError(f"{target}: not written, {command[0]} failed ({last})", code="sbom-incomplete")


if __name__ == "__main__":
    run_command(main)
