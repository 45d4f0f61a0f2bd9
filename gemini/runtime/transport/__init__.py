"""Transport: messages and tensors between processes, over sockets and shared memory or between hosts."""
