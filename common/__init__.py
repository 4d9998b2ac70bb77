"""What training and serving agree on; it imports neither, and no PyTorch."""
