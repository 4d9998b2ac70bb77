"""The models that the serving benchmarks are run with."""

from tests.inference.conftest import exported_folder, model_folder, rows_file

__all__ = ["exported_folder", "model_folder", "rows_file"]
