"""`metis`: METIS k-way, then stages.

Read in this order: `engine` calls METIS, `repair` makes its parts acyclic where a worker may have one stage only,
`solve` is the partitioner.
"""

from gemini.partition.metis.metis_partitioner import partition_metis

__all__ = ["partition_metis"]
