"""Schedules for other tools: torch.distributed.pipelining's CSV and Chrome/Perfetto traces, export and import."""

from gemini.schedule.export.perfetto import load_trace, save_trace, trace
from gemini.schedule.export.torch_csv import dumps_csv, load_csv, loads_csv, save_csv

__all__ = ["dumps_csv", "load_csv", "load_trace", "loads_csv", "save_csv", "save_trace", "trace"]
