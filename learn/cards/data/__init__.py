"""Cards that read the data and make it ready."""
