"""What is deployed in these tests: the tiny models of the serving tests, their servers, and what is started."""

from tests.inference.conftest import exported_copy, exported_folder, model_folder, rows_file, start_server
from tests.training.conftest import start

__all__ = ["exported_copy", "exported_folder", "model_folder", "rows_file", "start", "start_server"]
