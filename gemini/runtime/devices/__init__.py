"""Devices: what the run time needs to know of an accelerator, behind one small interface."""
