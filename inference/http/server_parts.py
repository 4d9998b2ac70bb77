"""The parts that a server consists of, for the gate and the routes."""

from __future__ import annotations

from dataclasses import dataclass

from inference.batching.served_model import LoadModel, ServedModel
from inference.http.api_keys import ApiKeys
from inference.http.body_budget import BodyBudget
from inference.http.lifecycle import Lifecycle
from inference.metrics import ServerMetrics
from inference.settings import Settings


@dataclass(frozen=True, slots=True)
class Parts:
    """Created once by `create_app`."""

    settings: Settings
    metrics: ServerMetrics
    lifecycle: Lifecycle
    api_keys: ApiKeys
    body_budget: BodyBudget
    served_model: ServedModel

    @classmethod
    def of(cls, settings: Settings, load_model: LoadModel) -> Parts:
        metrics = ServerMetrics()
        body_budget = BodyBudget(int(settings.max_pending_mb * 2**20))
        metrics.watch("pending_body_bytes", "Bodies of requests in progress.", lambda: body_budget.held_bytes)
        return cls(
            settings=settings,
            metrics=metrics,
            lifecycle=Lifecycle(settings),
            api_keys=ApiKeys(settings.api_key.get_secret_value() if settings.api_key else None, settings.api_keys_file),
            body_budget=body_budget,
            served_model=ServedModel(settings, metrics, load_model),
        )

    @property
    def dead(self) -> str | None:
        """Why the process has to be restarted, or None."""
        return self.served_model.error if self.served_model.needs_restart else None

    @property
    def unready(self) -> str | None:
        """Why requests should go elsewhere, or None."""
        return "the server is shutting down" if self.lifecycle.is_draining else self.served_model.error
