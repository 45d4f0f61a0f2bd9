"""`mpipe`: a mixed pipeline, in which a worker may run several non-adjacent stages.

`coarsen` merges items that should share a stage, `seeds` cuts the coarse graph into more pieces than there are workers,
`lpt` assigns pieces to workers, `mpipe_partitioner` refines on the way back and selects the best result.
"""
