"""Node writer: nodes of a graph as data, imported all at once.

Importing a graph definition costs a tenth of creating its ops one by one. Names refer to nodes written here or to ops
that the graph has already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gemini.tensorflow.loop_shapes import const_node

_DROPPED = ("_class", "_output_shapes")
_INT32 = 3  # DT_INT32


class NodeWriter:
    """Nodes for one graph, under one prefix; `place` is the device of those that follow."""

    def __init__(self, graph: Any, prefix: str) -> None:
        import tensorflow.compat.v1 as tf

        self.graph = graph
        self.prefix = prefix
        self.definition = tf.GraphDef()
        self.definition.versions.CopyFrom(graph.as_graph_def().versions)
        self._count = 0

    def __len__(self) -> int:
        return len(self.definition.node)

    def fresh(self, kind: str) -> str:
        """Return a name for a node that has none."""
        self._count += 1
        return f"{self.prefix}M/{kind}_{self._count}"

    def add(self, kind: str, name: str, inputs: Sequence[str], device: str, **attributes: Any) -> str:
        """Write a node; attributes are numbers of DTypes (`…_type`, in lists `…_types`) or integers."""
        node = self.definition.node.add(name=name, op=kind, device=device)
        node.input.extend(map(_short, inputs))
        for key, value in attributes.items():
            if key.endswith("_type"):
                node.attr[key.removesuffix("_type")].type = value
            elif key.endswith("_types"):
                node.attr[key.removesuffix("_types")].list.type.extend(value)
            else:
                node.attr[key].i = value
        return name + ":0"

    def copy(self, node: Any, name: str, inputs: Sequence[str], device: str, kind: str = "") -> Any:
        """Write and return a copy of a node with other inputs, as an op of another `kind` if one is given."""
        made = self.definition.node.add()
        made.CopyFrom(node)
        made.name, made.device = name, device
        made.op = kind or made.op
        del made.input[:]
        made.input.extend(map(_short, inputs))
        for key in _DROPPED:
            made.attr.pop(key, None)
        self._own_functions(made)
        return made

    def _own_functions(self, node: Any) -> None:
        """Let a node call copies of its functions: TensorFlow names the gradients of a loop by its functions."""
        from tensorflow.python.framework.function_def_to_graph import get_function_def

        for value in node.attr.values():
            for function in [value.func] if value.HasField("func") else value.list.func:
                self._count += 1
                own = self.definition.library.function.add()
                own.CopyFrom(get_function_def(function.name, self.graph))
                function.name = f"{function.name}_{self.prefix.replace('/', '_')}{self._count}"
                own.signature.name = function.name
                for inner in own.node_def:
                    self._own_functions(inner)

    def constant(self, value: Any, device: str, name: str = "") -> str:
        """Write a constant."""
        name = name or self.fresh("Const")
        node = self.definition.node.add()
        node.CopyFrom(const_node(name, np.asarray(value)))
        node.device = device
        return name + ":0"

    # ── moves ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def add_up(self, parts: Sequence[str], dtype: int, device: str) -> str:
        """Write the sum of tensors of one shape."""
        if len(parts) == 1:
            return parts[0]
        return self.add("AddN", self.fresh("Sum"), parts, device, N=len(parts), T_type=dtype)

    def group(self, parts: Sequence[str], name: str, device: str) -> None:
        """Write an op without data that follows others."""
        self.add("NoOp", name, [f"^{part.partition(':')[0]}" for part in parts], device)

    def concatenate(self, parts: Sequence[str], dim: int, dtype: int, device: str, name: str = "") -> str:
        """Write the concatenation of tensors."""
        if len(parts) == 1:
            return parts[0]
        axis = self.constant(np.int32(dim), device)
        name = name or self.fresh("Concat")
        return self.add("ConcatV2", name, [*parts, axis], device, N=len(parts), T_type=dtype, Tidx_type=_INT32)

    def split(self, whole: str, sizes: Sequence[int], dim: int, dtype: int, device: str) -> list[str]:
        """Write the pieces of a tensor along a dimension."""
        if len(sizes) == 1:
            return [whole]
        operands = [whole, self.constant(np.array(sizes, np.int32), device), self.constant(np.int32(dim), device)]
        name = self.fresh("Split")
        self.add("SplitV", name, operands, device, num_split=len(sizes), T_type=dtype, Tlen_type=_INT32)
        return [f"{name}:{at}" for at in range(len(sizes))]

    def reshape(self, value: str, shape: Sequence[int], dtype: int, device: str) -> str:
        """Write a reshape."""
        operands = [value, self.constant(np.array(shape, np.int32), device)]
        return self.add("Reshape", self.fresh("Reshape"), operands, device, T_type=dtype, Tshape_type=_INT32)

    def flush(self) -> None:
        """Import what was written since the last time."""
        if self.definition.node:
            import_nodes(self.graph, self.definition)
            del self.definition.node[:], self.definition.library.function[:]


def import_nodes(graph: Any, definition: Any) -> None:
    """Add nodes to a graph under their own names; inputs that are not among them are ops of the graph.

    TensorFlow maps such inputs to tensors only: for order alone, an op without results is connected afterwards.
    """
    import tensorflow.compat.v1 as tf

    own = {node.name for node in definition.node}
    mapped: dict[str, Any] = {}
    later: list[tuple[str, Any]] = []
    for node in definition.node:
        gone = []
        for name in node.input:
            base, _, index = name.lstrip("^").partition(":")
            if base in own or name in mapped:
                continue
            if not name.startswith("^"):
                mapped[name] = graph.get_tensor_by_name(f"{base}:{index or 0}")
                continue
            op = graph.get_operation_by_name(base)
            if op.outputs:
                mapped[name] = op.outputs[0]
            else:
                gone.append(name)
                later.append((node.name, op))
        if gone:
            kept = [name for name in node.input if name not in gone]
            del node.input[:]
            node.input.extend(kept)
    with graph.as_default():
        tf.import_graph_def(definition, mapped, name="")
    for name, op in later:
        graph.get_operation_by_name(name)._add_control_input(op)


def _short(name: str) -> str:
    """Return the name of an input as graph definitions write it."""
    return name.removesuffix(":0") if not name.startswith("^") else name
