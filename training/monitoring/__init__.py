"""Monitoring: one stream of a run's events, and its readers: files, console, exporter, trackers, profiler, checks."""

from training.monitoring.console import Console
from training.monitoring.events import EventStream
from training.monitoring.exporter import Exporter
from training.monitoring.records import EpochMetrics, SavedCheckpoint, StepMetrics

__all__ = ["Console", "EpochMetrics", "EventStream", "Exporter", "SavedCheckpoint", "StepMetrics"]
