"""The analysis of a partition: time, memory and traffic per stage and worker, as a table and as a picture."""
