"""`metis`: METIS k-way partitioning, then stages.

`metis_call` calls METIS, `acyclic_repair` makes its parts acyclic where every worker has one stage, `metis_partitioner`
is the partitioner.
"""
