"""The names of the project's first version: each import that the table gives for one of them works."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import REPOSITORY

SECTION = (REPOSITORY / "docs" / "ARCHITECTURE.md").read_text().partition("## Names of the first version")[2]
IMPORTS = re.findall(r"`(from [\w.]+ import [\w, ]+)`", SECTION.partition("\n## ")[0])


@pytest.mark.parametrize("line", IMPORTS)
def test_a_name_of_the_first_version_is_found_where_the_table_says(line: str) -> None:
    exec(line, {})


def test_the_table_names_every_module_that_the_first_version_had() -> None:
    modules = {line.split()[1] for line in IMPORTS}
    assert {"training.model", "training.dataset", "training.utils", "inference.model_loader"} <= modules


def test_the_classifier_names_its_labels_as_it_did() -> None:
    from training.model import LABEL_MAP, NewsClassifier

    model = NewsClassifier(pretrained_model="tiny", vocab_size=64)

    assert [model.get_label_name(label) for label in LABEL_MAP] == list(LABEL_MAP.values())
