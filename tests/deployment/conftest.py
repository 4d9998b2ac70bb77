"""What is deployed in these tests: the tiny models of the serving tests, and their servers."""

from tests.inference.conftest import exported_copy, exported_folder, model_folder, rows_file, start_server

__all__ = ["exported_copy", "exported_folder", "model_folder", "rows_file", "start_server"]
