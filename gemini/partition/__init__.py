"""Partition: a profiled graph in stages, balanced over workers."""

from gemini.partition.analysis.analyse import analyse
from gemini.partition.analysis.stage_figures import Analysis
from gemini.partition.assignment import Partition
from gemini.partition.entry import partition
from gemini.partition.partition_options import Options, Worker
from gemini.partition.partitioner_comparison import Comparison, compare

__all__ = ["Analysis", "Comparison", "Options", "Partition", "Worker", "analyse", "compare", "partition"]
