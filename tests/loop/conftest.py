"""A tiny model with its artefact, as the tests of serving make it."""

from tests.inference.conftest import model_folder, rows_file

__all__ = ["model_folder", "rows_file"]
