"""Write what the images hold: a CycloneDX bill of materials of each lock, and one audit for known vulnerabilities.

python deployment/write_sbom.py [--output build/sbom]. Exit code 0: nothing is known; 1: something is; 2: not audited.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only its own folder by itself

from common.errors import OneLineParser, UserError, run_command
from deployment.image_context import ROOT

LOCKS = [ROOT / "deployment" / f"requirements{part}.txt" for part in ("", "-torch", "-torch-cuda")]


class SbomError(UserError): ...


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/sbom"), help="default: build/sbom")
    parser.add_argument("--osv_url", help="an OSV service to ask instead of the public one")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for lock in LOCKS:
        bill = options.output / f"{lock.stem}.cdx.json"
        write_bill(lock, bill)
        print(f"Written: {bill}", flush=True)
    packages = audit(LOCKS, options.output / "audit.json", options.osv_url)
    found = [
        f"{package['name']} {package['version']}: {flaw['id']}" for package in packages for flaw in package["vulns"]
    ]
    print("\n".join([f"{len(packages)} packages audited, known vulnerabilities: {len(found)}", *found]))
    return 1 if found else 0


def write_bill(lock: Path, target: Path) -> None:
    """Write the CycloneDX list of a lock's packages with their hashes."""
    described = ["--output-reproducible", "--no-validate", "--pyproject", str(ROOT / "pyproject.toml")]
    _run(["cyclonedx_py", "requirements", *described, "--output-file", str(target), str(lock)], target)


def audit(locks: list[Path], target: Path, osv_url: str | None) -> list[dict[str, Any]]:
    """Query the known vulnerabilities of all locked packages; returns each package with its own."""
    command = ["pip_audit", "--disable-pip", "--require-hashes", "--format", "json", "--progress-spinner", "off"]
    service = ["--vulnerability-service", "osv", *(["--osv-url", osv_url] if osv_url else [])]
    requirements = [word for lock in locks for word in ("--requirement", str(lock))]
    _run([*command, *service, *requirements, "--output", str(target)], target)
    packages = json.loads(target.read_text())["dependencies"]
    # The tool itself counts what it could not look up as harmless.
    if skipped := [package["name"] for package in packages if "skip_reason" in package]:
        raise SbomError(f"{target}: not audited: {', '.join(skipped)}; the file says why", code="sbom-incomplete")
    return packages


def _run(command: list[str], target: Path) -> None:
    # What an earlier run wrote must not pass for this one's; and no exit code tells a finding from a failure.
    target.unlink(missing_ok=True)
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    if target.exists():
        return
    last = ([line for line in done.stderr.splitlines() if line.strip()] or ["no output"])[-1]
    if "No module named" in last:
        raise SbomError(f"{last}; install the tools with pip install -e '.[dev]'", code="package-missing")
    if "ConnectionError" in last:
        raise SbomError(
            f"{target}: not written, the vulnerability service cannot be reached; the bills are complete",
            code="sbom-incomplete",
        )
    raise SbomError(f"{target}: not written, {command[0]} failed ({last})", code="sbom-incomplete")


if __name__ == "__main__":
    run_command(main)
