"""Hooks of MkDocs: measured pages, the sources that pages link to, and a run of the cards become part of the site."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from os.path import relpath
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\]\((?P<path>[^()\s#:]+)(?P<anchor>#[^()\s]*)?\)")
_LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".c": "c", ".md": "markdown"}

# A page of the site that the repository does not have: the link to it takes the place of this mark.
_RUN, _RUN_MARK = "recorded_run.html", "<!-- recorded run -->"
_RUN_LINK = f"[Open a recorded run of the default pipeline]({_RUN}), and choose a card to see what every rank held."

# The front page of the site, not of the folder: three ways in, and a picture of the first.
_DOORS_MARK = "<!-- doors -->"
_DOORS = f"""[Open a recorded run]({_RUN}){{ .md-button .md-button--primary }}
[Play with the toys](TOYS.md){{ .md-button }}
[Start lesson 1](lessons/ring.md){{ .md-button }}

[![Gradients of four ranks, different before the all-reduce and equal after it](cards.png){{ width=400 }}]({_RUN})"""
_GUIDE = "DISTRIBUTED_TRAINING_GUIDE.md"
_SECTION = re.compile(r"^## \d+\. .+$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the measured pages, by their headings."""
    paths = sorted((REPOSITORY / "benchmarks").glob("*.md"))
    titles = {re.search(r"^# (.+)$", path.read_text(), re.MULTILINE)[1]: path for path in paths}
    # The last entry of the menu in mkdocs.yml only stands in for these.
    config.nav[-1] = {"Measured": [{title: f"benchmarks/{path.name}"} for title, path in titles.items()]}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the measured pages with their pictures, each file of the repository that a page links to, and a run."""
    files.append(File.generated(config, _RUN, content=_recorded_run()))
    for path in sorted((REPOSITORY / "benchmarks").iterdir()):
        if path.suffix in (".md", ".png"):
            # The pages keep their folder, so that links between them stay right.
            name = str(path.relative_to(REPOSITORY))
            files.append(File.generated(config, name, abs_src_path=str(path)))
    # A copy of the list, because the loop adds files; links within the sources that it adds are not
    # followed.
    for page in list(files.documentation_pages()):
        for target in _links(page.content_string, _place(page.src_uri)):
            name = _name_on_site(target)
            if name not in files.src_uris:
                files.append(File.generated(config, name, content=_source_page(target)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links to files of the repository lead to their pages here."""
    folder = _place(page.file.src_uri)
    markdown = markdown.replace(_RUN_MARK, _RUN_LINK).replace(_DOORS_MARK, _DOORS)
    if page.file.src_uri == _GUIDE:
        markdown = _with_progress(markdown)

    def rewritten(match: re.Match[str]) -> str:
        target = (folder / match["path"]).resolve()
        if not _is_ours(target):
            return match[0]
        # Relative, so that the site works at any address.
        address = relpath(_name_on_site(target), Path(page.file.src_uri).parent)
        return f"]({address}{match['anchor'] or ''})"

    # A source is shown as it is: brackets in its code are no links.
    return markdown if page.file.src_uri.startswith("source/") else _LINK.sub(rewritten, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Give the theme's search a name, which a dialog has to have."""
    return output.replace('role="dialog">', 'role="dialog" aria-label="Search">')


def _with_progress(markdown: str) -> str:
    """Below the heading of each section, its number and how many there are."""
    total = len(_SECTION.findall(markdown))
    numbers = iter(range(1, total + 1))
    return _SECTION.sub(lambda head: f"{head[0]}\n\nSection {next(numbers)} of {total}\n{{: .section }}", markdown)


@cache  # mkdocs serve builds again and again
def _recorded_run() -> str:
    """The page of a run of the cards that is made now, so that it shows what this version does."""
    with TemporaryDirectory() as folder:
        page = Path(folder) / "run.html"
        command = [sys.executable, "-m", "learn.cards", "run", "--output", f"{folder}/runs", "--report", str(page)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        if done.returncode:
            raise PluginError(f"the run of the cards failed: {done.stderr.strip()}")
        back = '<header>\n    <p><a href="./">DistriNews</a></p>'
        return page.read_text(encoding="utf-8").replace("<header>", back, 1)


def _place(src_uri: str) -> Path:
    """The folder of the repository that the links of a page start from."""
    return (REPOSITORY if src_uri.startswith("benchmarks/") else REPOSITORY / "docs") / Path(src_uri).parent


def _links(markdown: str, folder: Path) -> list[Path]:
    targets = ((folder / match["path"]).resolve() for match in _LINK.finditer(markdown))
    return [target for target in targets if _is_ours(target)]


def _is_ours(target: Path) -> bool:
    return target.is_file() and target.is_relative_to(REPOSITORY)


def _name_on_site(target: Path) -> str:
    """Where a file of the repository lies on the site; the pages of docs/ at its top, sources as pages of their own."""
    name = target.relative_to(REPOSITORY)
    if name.is_relative_to("docs"):
        return str(name.relative_to("docs"))
    if name.parent == Path("benchmarks") and name.suffix in (".md", ".png"):
        return str(name)
    return f"source/{name}.md"


def _source_page(path: Path) -> str:
    """A file as it stands in the repository; not in the search, which is for explanations."""
    name, language = path.relative_to(REPOSITORY), _LANGUAGES.get(path.suffix, "text")
    # Longer than any fence inside a Markdown file, which would otherwise end the block.
    fence = "`" * 8
    head = f"---\nsearch: {{exclude: true}}\nhide: [toc]\n---\n# {name}\n\n"
    return f'{head}{fence}{language} linenums="1"\n{path.read_text()}\n{fence}\n'
