"""Partition: a profiled graph in stages, balanced over workers."""

from gemini.partition.analysis import analyse
from gemini.partition.compare import Comparison, compare
from gemini.partition.entry import partition
from gemini.partition.figures import Analysis
from gemini.partition.options import Options, Worker
from gemini.partition.partition import Partition

__all__ = ["Analysis", "Comparison", "Options", "Partition", "Worker", "analyse", "compare", "partition"]
