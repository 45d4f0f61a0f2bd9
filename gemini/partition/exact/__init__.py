"""`exact`: the optimal partition of its search space, proven optimal or with the remaining gap.

`prefix_costs` prices every segment of an item order, `device_order` assigns workers to segments, `contiguous` finds the
best cuts, `chunked` the best cuts with several stages per worker, `convex` non-contiguous stages; `exact_partitioner`
combines them.
"""
