"""``from inference.model_loader import ModelLoader, load_shared``: the same under a short name."""

from inference.engines.model_loader import ModelLoader, load_shared

__all__ = ["ModelLoader", "load_shared"]
