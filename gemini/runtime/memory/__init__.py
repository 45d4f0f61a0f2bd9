"""Memory: a model's tensors, stored once, where every process of the run can reach them."""
