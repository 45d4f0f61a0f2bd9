"""Rules of ops whose weights are divided, or that pass on sums of shards; other ops follow the batch rules."""
