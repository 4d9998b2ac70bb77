"""Training: from text and labels to a model folder, on one process or many."""
