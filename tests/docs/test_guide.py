"""The guide: its scripts run on as many ranks as it says, its diffs are those of its files, its terms are explained."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deployment.documented import documented
from tests.docs.pages import REPOSITORY, blocks_of_python, diffs
from tests.docs.test_commands import is_excerpt

GUIDE = "docs/DISTRIBUTED_TRAINING_GUIDE.md"
TEXT = (REPOSITORY / GUIDE).read_text()
ONE_SCRIPT = REPOSITORY / "learn" / "one_script"
BLOCKS = blocks_of_python(GUIDE)
SCRIPTS = [block for block in BLOCKS if block.num_ranks]
# Code, links' targets and headings use terms before prose explains them.
NOT_PROSE = re.compile(
    r"^(`{3,}).*?^\1$|`[^`\n]+`|\]\([^)]*\)|<!--.*?-->|^#.*?$|^\*\*In the code\*\*.*?(?=\n\n)", re.M | re.S
)


def run_script(path: Path, num_ranks: int, folder: Path) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"] if num_ranks else []
    done = subprocess.run(
        [sys.executable, *launcher, path],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_script_of_the_guide_prints_on_real_ranks_what_stands_behind_it(number: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[number].code)

    printed = run_script(script, SCRIPTS[number].num_ranks, tmp_path)
    assert is_excerpt(SCRIPTS[number].printed, printed), printed


def test_the_file_that_the_guide_shows_is_that_file() -> None:
    [shown] = [block for block in BLOCKS if block.copy_of]

    assert shown.code == (REPOSITORY / shown.copy_of).read_text()


def test_a_diff_that_the_guide_shows_is_that_of_its_two_files() -> None:
    assert len(diffs(GUIDE)) == 2
    for before, after, shown in diffs(GUIDE):
        texts = ((REPOSITORY / path).read_text().splitlines() for path in (before, after))
        lines = difflib.unified_diff(*texts, Path(before).name, Path(after).name, n=1, lineterm="")
        assert shown == "".join(f"{line}\n" for line in lines)


def _losses_shown() -> dict[str, list[float]]:
    table = TEXT.split("<!-- losses -->\n\n", 1)[1].split("\n\n", 1)[0]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {name: [float(row[column]) for row in rows] for column, name in enumerate(header) if column}


@pytest.mark.slow
@pytest.mark.parametrize("name", _losses_shown())
def test_one_script_on_any_number_of_ranks_has_the_losses_that_the_guide_shows(name: str, tmp_path: Path) -> None:
    script, ranks = re.fullmatch(r"`(\w+\.py)`(?:, (\d) ranks)?", name).groups()
    starts = f"--nproc_per_node={ranks} learn/one_script/{script}" if ranks else f"python learn/one_script/{script}"
    assert starts in documented(GUIDE, "one-script")

    printed = run_script(ONE_SCRIPT / script, int(ranks or 0), tmp_path)

    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses == pytest.approx(_losses_shown()[name], abs=3e-6)
    assert (tmp_path / "model.pt").exists()


def test_a_term_is_explained_before_the_guide_uses_it() -> None:
    """Each term of the glossary occurs first in the section that the glossary names."""
    body, glossary = TEXT.split("\n## Glossary\n")
    sections = {int(number): part for number, part in re.findall(r"\n## (\d+)\. (.*?)(?=\n## |\Z)", body, re.S)}
    terms = re.findall(r"\[([^]]+)\]\(#(\d+)-", glossary)

    assert len(terms) > 30
    early = []
    for term, explained in terms:
        for number in range(1, int(explained)):
            prose = NOT_PROSE.sub(" ", sections[number])
            if re.search(rf"\b{re.escape(term)}", prose, re.IGNORECASE):
                early.append(f"{term} is explained in section {explained} and used in section {number}")
                break
    assert early == []
