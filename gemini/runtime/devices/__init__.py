"""Devices: the interface that the run time needs of an accelerator, and its back ends."""
