"""How good a model is on rows that it was not trained on."""
