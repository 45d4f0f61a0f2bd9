"""Code generation: a partitioned graph as readable stages."""

from gemini.codegen.stage_generator import StageCode, generate_stages
from gemini.codegen.stage_interface import Interface, Port, interfaces

__all__ = ["Interface", "Port", "StageCode", "generate_stages", "interfaces"]
