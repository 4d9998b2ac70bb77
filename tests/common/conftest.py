"""A trained folder and a short training run, from the tests of both halves."""

from tests.inference.conftest import labels, model_folder, texts
from tests.training.conftest import base_flags, train_here

__all__ = ["base_flags", "labels", "model_folder", "texts", "train_here"]
