"""The card that makes one model of what the ranks hold."""
