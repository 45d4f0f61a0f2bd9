"""Capture: a PyTorch model as a graph that can be run, partitioned, drawn and saved."""

from gemini.capture.entry import capture
from gemini.ir.graph import Graph
from gemini.ir.node import Guard, Node, TensorMeta

__all__ = ["Graph", "Guard", "Node", "TensorMeta", "capture"]
