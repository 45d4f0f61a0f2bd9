"""Local search: the parts shared by partitioners that improve a solution step by step.

A `SearchState` assigns items to *blocks* in topological order, and each block to a worker. One block per worker is a
straight pipeline, several are a mixed one. `initial` builds the first candidates, `item_moves` and `acyclic_moves`
improve them, `stage_builder` turns workers of items into stages, `score` ranks candidates.
"""
