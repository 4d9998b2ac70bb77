"""Scoring of files: parts that processes share, forward passes on all cores, whole outputs."""
