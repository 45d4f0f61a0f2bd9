"""Profiling: the time and memory of every node of a captured graph, measured or estimated."""

from gemini.profiling.device_specs import SPECS, DeviceSpec
from gemini.profiling.entry import profile
from gemini.profiling.measured_device import Device, find_device
from gemini.profiling.node_costs import NodeCost
from gemini.profiling.profile_result import Check, Profile

__all__ = ["SPECS", "Check", "Device", "DeviceSpec", "NodeCost", "Profile", "find_device", "profile"]
