"""Strategies: how a model is distributed over ranks. One file each, one line each in the registry."""
