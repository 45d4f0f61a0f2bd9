"""Partition: a profiled graph in stages, balanced over workers."""

from gemini.partition.entry import partition
from gemini.partition.options import Options, Worker
from gemini.partition.partition import Partition

__all__ = ["Options", "Partition", "Worker", "partition"]
