"""From files of text and labels to batches of token ids."""
