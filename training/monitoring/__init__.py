"""Monitoring: what a person sees of a run, and the files the run leaves."""

from training.monitoring.console import Console
from training.monitoring.events import EventLog
from training.monitoring.exporter import Exporter
from training.monitoring.records import EpochMetrics, ReportData, SavedCheckpoint, StepMetrics, WrongText
from training.monitoring.report import write_report
from training.monitoring.run_log import RunLog, read_metrics

__all__ = [
    "Console",
    "EpochMetrics",
    "EventLog",
    "Exporter",
    "ReportData",
    "RunLog",
    "SavedCheckpoint",
    "StepMetrics",
    "WrongText",
    "read_metrics",
    "write_report",
]
