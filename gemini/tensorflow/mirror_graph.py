"""Mirror graph: a copy of the script's graph under the same names, with devices, to which twins are added.

The script's graph stays as it is: without devices, without twins. Ops that the script adds later are mirrored before
the next step. A variable keeps the device that it had when it was mirrored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gemini.errors import GraphError
from gemini.tensorflow.graph_branches import is_branched, write_branches
from gemini.tensorflow.node_writer import NodeWriter
from gemini.tensorflow.sharded_variables import VariableShards


class MirrorGraph:
    """A copy of `source`; `graph` is the copy, `node_of` the definition of every node of the source."""

    def __init__(self, source: Any) -> None:
        import tensorflow.compat.v1 as tf

        self.source = source
        self.graph = tf.Graph()
        self.node_of: dict[str, Any] = {}
        self.library: Any = source.as_graph_def().library
        self.variables: VariableShards | None = None
        self._writer = NodeWriter(self.graph, "gemini/variables/")
        self._version = 0
        self._device_of: dict[str, str] = {}

    def sync(self, device_of: Mapping[str, str], forward: Collection[str] = ()) -> None:
        """Copy what the source has gained; new ops take the devices given by name.

        Conditionals among the ops `forward` are written as their branches.
        """
        if self._version == self.source.version:
            return
        fresh = self.source.as_graph_def()
        self._version = self.source.version
        self.library = fresh.library
        added = self._writer.definition
        added.library.CopyFrom(fresh.library)
        functions = {one.signature.name: one for one in fresh.library.function}
        for node in fresh.node:
            if (known := self.node_of.get(node.name)) is not None:
                _check_unchanged(known, node)
                continue
            self.node_of[node.name] = node
            if self.variables is not None and self.variables.write(self._writer, node):
                continue
            if node.name in forward and is_branched(node, functions):
                write_branches(self._writer, node, functions, self._choose_device(node, device_of))
                continue
            copy = added.node.add()
            copy.CopyFrom(node)
            copy.device = self._choose_device(node, device_of)
            copy.attr.pop("_class", None)
        self._writer.flush()

    def _choose_device(self, node: Any, device_of: Mapping[str, str]) -> str:
        """Return the device of an op: its own, that of the variable it belongs to, or that of the script."""
        device = device_of.get(node.name)
        if device is None and node.op == "VarHandleOp":
            groups = node.attr["_class"].list.s if "_class" in node.attr else ()
            near = [self._device_of.get(group.decode().removeprefix("loc:@"), "") for group in groups]
            device = next(filter(None, near), None)
        device = node.device if device is None else device
        self._device_of[node.name] = device
        return device

    @staticmethod
    def complete(ops: list[Any]) -> list[Any]:
        """Return ops of the source in a form that stands alone: as they are."""
        return ops

    def tensor(self, name: str) -> Any:
        """Return the copy of a tensor."""
        return self.graph.get_tensor_by_name(name)

    def op(self, name: str) -> Any:
        """Return the copy of an op."""
        return self.graph.get_operation_by_name(name)


def _check_unchanged(known: Any, node: Any) -> None:
    if known != node:
        raise GraphError(
            f"{node.name} ({node.op}) was changed after the first run of its session\n"
            "    → build the whole graph before, or make a new session"
        )
