"""The classifier, and the numbers it computes in: ``from training.model import NewsClassifier``."""

from typing import Any

__all__ = ["LABEL_MAP", "NewsClassifier"]


def __getattr__(name: str) -> Any:
    # Only when one of them is asked for: most who import a module of this package need no
    # classifier.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from training.model import classifier

    return getattr(classifier, name)
