"""The executor: runs a step on the workers by any plan; forward, loss and backward of all micro-batches overlap."""
