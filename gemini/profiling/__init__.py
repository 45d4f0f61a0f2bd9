"""Profiling: what every node of a captured graph costs, measured or estimated."""

from gemini.profiling.costs import NodeCost
from gemini.profiling.device import Device, find_device
from gemini.profiling.entry import profile
from gemini.profiling.result import Check, Profile
from gemini.profiling.specs import SPECS, DeviceSpec

__all__ = ["SPECS", "Check", "Device", "DeviceSpec", "NodeCost", "Profile", "find_device", "profile"]
