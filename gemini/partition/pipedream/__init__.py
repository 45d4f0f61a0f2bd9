"""`pipedream`: PipeDream's dynamic program, for straight pipelines and pipelines with replicated stages.

`merged_items` prices every segment of items, `straight` finds the best pipeline with one worker per stage, `replicated`
the best one in which a stage may have several workers, `pipedream_partitioner` is the partitioner.
"""
