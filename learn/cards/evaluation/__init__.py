"""The card that tests the model."""
