"""Scoring of files: parts that processes share, forward passes that keep all cores busy, whole outputs."""
