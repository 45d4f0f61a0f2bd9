"""Transport: how messages and tensors move between processes of one machine."""
