"""`mpipe`: a mixed pipe, in which a worker runs several stages that need not be neighbours.

Read in this order: `coarsening` merges what should not be cut apart, `centres` cuts the coarse graph into more pieces
than there are workers, `packing` gives the pieces to workers, `solve` refines on the way back and picks the best.
"""

from gemini.partition.mpipe.mpipe_partitioner import partition_mpipe

__all__ = ["partition_mpipe"]
