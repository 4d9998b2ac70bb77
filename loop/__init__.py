"""From corrections to a better model: review, retrain, compare, promote."""
