"""Planning: memory, communication and time of a training run on hardware that is not here, without PyTorch."""
