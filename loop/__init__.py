"""From a served model's stream to a better model: review, retrain, compare, promote."""
