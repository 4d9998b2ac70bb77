"""Card 12: test the model on rows that it was not trained on."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from learn.cards.base import BaseCard, CardConfig, Preview, Values
from learn.cards.model import build_mlp
from learn.cards.storage import Storage


class EvaluateConfig(CardConfig):
    """Nothing to set."""


class Evaluate(BaseCard[EvaluateConfig]):
    """Counts what the saved model gets right; each rank takes some of the test rows."""

    card_type = "dist_evaluate"
    display_name = "Evaluate"
    description = "Reads the model from its file, shares the test rows out, and adds up what the ranks have counted."
    look_at = "Every test row is counted once, on one rank; the totals are summed, never the ranks' accuracies."
    category = "evaluation"
    execution_mode = "distributed"
    output_view_type = "metrics"
    config_schema = EvaluateConfig
    input_schema: ClassVar = {"aggregated_model": "aggregated_model", "prepared_data": "prepared_data"}
    output_schema: ClassVar = {"eval_metrics": "eval_metrics"}

    def execute(self, config: EvaluateConfig, inputs: Values, storage: Storage) -> dict[str, Any]:
        """Put this rank's test rows through the model; counts and losses are summed over the ranks."""
        prepared, key = inputs["prepared_data"], inputs["aggregated_model"]["model"]
        device = next(storage.live["model"].parameters()).device
        model = build_mlp(storage.load(key)["layers"])
        model.load_state_dict(storage.tensors(key))
        model.to(device).eval()

        data = storage.tensors(prepared["tensors"])
        own = slice(dist.get_rank(), None, dist.get_world_size())
        labels = data["test_labels"][own].to(device)
        with torch.no_grad():
            logits = model(data["test_features"][own].to(device))
        loss = F.cross_entropy(logits, labels, reduction="sum").double()
        counts = confusion(labels, logits.argmax(1), len(prepared["classes"]))
        own_counts = {"rows": len(labels), "correct": int(counts.trace())}
        dist.all_reduce(loss)
        dist.all_reduce(counts)

        rows = int(counts.sum())
        metrics = {"rows": rows, "accuracy": int(counts.trace()) / rows, "loss": loss.item() / rows}
        metrics |= {"classes": prepared["classes"], "confusion": counts.tolist(), "own": own_counts}
        return {"eval_metrics": metrics}

    def get_output_preview(self, outputs: Values, storage: Storage) -> Preview:
        """Accuracy and loss; of each class its rows, by the class that they were taken for."""
        metrics = outputs["eval_metrics"]
        rows = [
            [name, *counts, f"{counts[number] / max(1, sum(counts)):.1%}"]
            for number, (name, counts) in enumerate(zip(metrics["classes"], metrics["confusion"], strict=True))
        ]
        return self.preview(
            ["class", *(f"taken for {name}" for name in metrics["classes"]), "right"],
            rows,
            accuracy=f"{metrics['accuracy']:.2%}",
            loss=round(metrics["loss"], 4),
            test_rows=metrics["rows"],
        )

    def metrics(self, outputs: Values) -> dict[str, float]:
        """Accuracy and loss."""
        return {name: outputs["eval_metrics"][name] for name in ("accuracy", "loss")}


def confusion(labels: torch.Tensor, predictions: torch.Tensor, num_classes: int) -> torch.Tensor:
    """How many rows of each class were taken for each class, (classes, classes)."""
    pairs = labels * num_classes + predictions
    return pairs.bincount(minlength=num_classes**2).reshape(num_classes, num_classes)
