"""``ModelLoader`` under a short name: ``from inference.model_loader import ModelLoader``."""

from inference.engines.model_loader import ModelLoader

__all__ = ["ModelLoader"]
