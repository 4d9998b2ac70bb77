"""What is served."""

from __future__ import annotations

from fastapi import APIRouter

from inference.http.error_responses import REFUSALS
from inference.http.routes.dependencies import PartsDep
from inference.http.schemas import ModelResponse

router = APIRouter(tags=["model"])


@router.get("/model", responses={503: REFUSALS[503]}, response_model_exclude_none=True)
async def get_model(parts: PartsDep) -> ModelResponse:
    """Describe the model: where it comes from, what it can say, how good it is, and what runs it."""
    served = parts.served_model.require()
    model = served.model
    # metrics.json is whatever lies beside the weights.
    dataset, test = model.metadata.get("dataset"), model.metadata.get("test")
    accuracy = test.get("accuracy") if isinstance(test, dict) else None
    return ModelResponse(
        name=served.name,
        revision=model.info["revision"],
        labels=model.labels,
        max_length=model.max_length,
        engine={name: value for name, value in model.info.items() if name not in ("name", "path", "revision")},
        training_data=dataset if isinstance(dataset, str) else None,
        test_accuracy=accuracy if isinstance(accuracy, int | float) else None,
        metrics=model.metadata,
    )
