"""Planning: memory, traffic and time of a training run on hardware that is not here. Nothing on it needs torch."""
