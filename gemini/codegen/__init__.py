"""Code generation: a partitioned graph as readable stages."""

from gemini.codegen.generate import StageCode, generate
from gemini.codegen.interface import Interface, Port, interfaces

__all__ = ["Interface", "Port", "StageCode", "generate", "interfaces"]
