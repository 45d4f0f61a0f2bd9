"""Rules: the batch kinds of the results of ops, in tables by category."""
