"""Batch analysis: the proof that a model and the loss recorded after it can run by micro-batches.

`prove_graph` propagates batch kinds through a captured graph, `prove` through the loss tape; `Precomputed` computes the
values that weights depend on; `check_splitting` compares a proof with numbers.
"""
