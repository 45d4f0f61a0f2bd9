"""The analysis of a partition: figures per stage and worker, as a table and as a picture."""
