"""A trained model on the Hugging Face Hub."""
