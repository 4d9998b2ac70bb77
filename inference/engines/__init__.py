"""Runtimes that turn token ids into logits, one file each, behind the interface in `base`."""
