"""`exact`: the partitioner that finds the optimum of what it searches, and proves it or says how far it may be off.

Read in this order: `orders` puts items in a row, `line` prices every stretch of a row, `seats` says which worker takes
which stretch, `contiguous` finds the best cuts, `solve` is the partitioner.
"""

from gemini.partition.exact.exact_partitioner import partition_exact

__all__ = ["partition_exact"]
