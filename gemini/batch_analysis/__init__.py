"""The proof that a model and the loss recorded after it split over micro-batches.

`prove_graph` follows samples through a captured graph, `prove` through the tape after it; `foresee` gives what shares
are computed from; `check` holds a proof against numbers.
"""
