"""From what a served model has seen to its successor: review, retrain, compare, promote."""
