"""Planning: memory, communication and time of a training run on hardware that you do not have,
without PyTorch.
"""
