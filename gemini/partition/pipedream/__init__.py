"""`pipedream`: the dynamic programme of PipeDream, straight pipes and pipes with replicated stages.

Read in this order: `row` prices every stretch of items, `straight` finds the best pipe with one worker a stage,
`replicated` the best one in which a stage may have several workers, level by level of the network, `solve` is the
partitioner.
"""

from gemini.partition.pipedream.pipedream_partitioner import partition_pipedream

__all__ = ["partition_pipedream"]
