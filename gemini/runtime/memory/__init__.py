"""Memory: the tensors of a model, stored once where every process of the run can access them."""
