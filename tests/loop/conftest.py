"""The tiny model of the serving tests, which these tests compare, promote and serve."""

from tests.inference.conftest import model_folder

__all__ = ["model_folder"]
