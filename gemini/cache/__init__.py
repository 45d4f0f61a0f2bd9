"""The on-disk cache of graphs and plans: one key, one atomic write."""
