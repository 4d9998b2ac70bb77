"""The one model of a server process: not loaded yet, loaded, or failed with a reason."""

from __future__ import annotations

import logging
from pathlib import Path

from inference.errors import ModelLoadError, ModelUnavailableError
from inference.model_loader import ModelLoader

logger = logging.getLogger(__name__)


class ServedModel:
    """Holds the loaded model, or the line that says why there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model: ModelLoader | None = None
        self.error: str | None = f"{path}: the model is still loading; ask again in a few seconds"

    def load(self) -> None:
        """Load the model, blocking; a failure is logged and kept in `error`, since the process stays up."""
        try:
            self.model = ModelLoader(self.path)
        except ModelLoadError as error:
            self.error = str(error)
            logger.error("No model is served: %s", error)
        except Exception as error:
            self.error = f"{self.path}: the model does not load ({type(error).__name__}: {error}); see the log"
            logger.exception("No model is served")
        else:
            self.error = None

    def require(self) -> ModelLoader:
        """Return the loaded model.

        Raises:
            ModelUnavailableError: None is loaded.
        """
        if self.model is None:
            raise ModelUnavailableError(self.error)
        return self.model
