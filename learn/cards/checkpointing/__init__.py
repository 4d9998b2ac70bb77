"""The card that saves what was trained."""
