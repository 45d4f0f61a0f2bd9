"""Plan picture: the ops of a layer with the layouts of their values and the collectives between them.

Nodes are coloured by the layout of their first result, weights by the layout in which they are stored. An edge with a
collective is red and named after it; `▲` marks the collective of the gradient.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from gemini.dot_render import without_font_warnings
from gemini.errors import MissingEngineError, ShardingError
from gemini.ir.graph import Graph
from gemini.ir.node import MODULES, Node
from gemini.ir.pytree import Ref, leaves
from gemini.nearest_name import nearest
from gemini.tensor_parallel.layouts import Layout, Partial, PartialGrad, Replicate, Shard, layout_text
from gemini.tensor_parallel.plan_summary import weight_texts
from gemini.tensor_parallel.shard_plan import InnerCollective, Move, ShardPlan

SUFFIXES = (".svg", ".png", ".pdf", ".dot")
_COLOURS: dict[type, str] = {Shard: "#cfe8ff", Partial: "#ffd9a8", PartialGrad: "#fff3b0", Replicate: "#f4f4f4"}
_WORDS: dict[type, str] = {
    Shard: "S1: a slice of dimension 1, S1/3: of its 3 groups", Partial: "P: a sum to be made",
    PartialGrad: "R+: whole, partial gradients", Replicate: "R: whole",
}  # fmt: skip
_RED = "#b3261e"
_MANY = 160


def check_picture_path(path: Path) -> None:
    """Raise ShardingError unless a picture can be written in this format."""
    if path.suffix.lower() not in SUFFIXES:
        raise ShardingError(f"cannot draw {path}\n    → name a file ending in {', '.join(SUFFIXES)}")


def picture_scope(graph: Graph, scope: str | None = None) -> str:
    """Return the scope to draw: this one, else the first layer of the longest list; "" for a small model."""
    modules = [node.target for node in graph.nodes if node.kind in MODULES]
    scopes = list(dict.fromkeys([*(scope for node in graph.nodes for scope in node.scope if scope), *modules]))
    if scope is not None:
        if scope and scope not in scopes:
            close = nearest(scope, scopes)
            hint = f"did you mean {close!r}?" if close else f"it has {', '.join(map(repr, scopes[:8]))} …"
            raise ShardingError(f"no op runs in a scope {scope!r}\n    → {hint}")
        return scope
    lists = [layers for layers in graph.layers() if len(layers) > 1]
    return max(lists, key=len)[0] if lists and len(graph.compute_nodes) > 40 else ""


def draw_plan(graph: Graph, plan: ShardPlan, path: Path, scope: str | None = None) -> None:
    """Write the picture of a scope in the format of the suffix of `path`."""
    check_picture_path(path)
    try:
        import pygraphviz
    except ImportError:
        raise MissingEngineError("pygraphviz", "viz", "drawing a plan") from None
    picture = pygraphviz.AGraph(directed=True, strict=False, rankdir="TB", ranksep="0.25", nodesep="0.15")
    picture.graph_attr.update(fontname="Helvetica", fontsize="12", labelloc="t")
    picture.node_attr.update(shape="box", style="rounded,filled", fontname="Helvetica", fontsize="10", height="0.3")
    picture.edge_attr.update(fontname="Helvetica", fontsize="9", arrowsize="0.6", color="#777777")
    _Picture(graph, plan, picture_scope(graph, scope), picture).draw()
    with without_font_warnings():
        picture.draw(str(path), prog="dot")


def _inner_text(one: InnerCollective) -> str:
    count = f"{one.times} " if one.times > 1 else ""
    return f"{'▲ ' if one.phase == 'backward' else ''}{count}{one.name} inside"


class _Picture:
    """One picture."""

    def __init__(self, graph: Graph, plan: ShardPlan, scope: str, picture: Any) -> None:
        self.graph, self.plan, self.scope, self.picture = graph, plan, scope, picture
        self.moves: dict[tuple[Ref | str, Layout], Move] = {
            (move.tensor or move.ref or "", move.want): move for move in plan.moves
        }
        inside = [node for node in graph.compute_nodes if not scope or scope in node.scope or node.target == scope]
        self.inside = {node.id: node for node in inside[:_MANY]}
        self.left = len(inside) - len(self.inside)

    def draw(self) -> None:
        """Draw nodes, edges and the legend."""
        rest = f" (its first {_MANY} ops, {self.left} more)" if self.left else ""
        share = f"{self.plan.sharded_share:.1%} of the parameters sharded"
        self.picture.graph_attr["label"] = f"{self.scope or self.plan.model} on {self.plan.size} shards: {share}{rest}"
        for node in self.inside.values():
            self._node(node)
            self._edges(node)
        for ref, layout in self.plan.results:
            if ref.node in self.inside:
                self._edge(f"n{ref.node}", "result", self.moves.get((ref, layout)), layout)
        self._legend()

    def _node(self, node: Node) -> None:
        one = self.plan.node(node.id)
        layout = one.outputs[0][1] if one.outputs else Replicate()
        name = escape(node.name.removeprefix(f"{self.scope}.") if self.scope else node.name)
        made = " ".join(layout_text(layout) for _, layout in one.outputs[:4])
        shape = next((str(list(meta.shape)) for meta in node.outputs.values()), "")
        stored = [(key.rpartition(".")[2], layout_text(wanted)) for key, wanted in one.parameters]
        weights = "".join(f'<br/><font point-size="9">{escape(text)}</font>' for text in weight_texts(stored))
        inner = "".join(f'<br/><font color="{_RED}">{_inner_text(one)}</font>' for one in one.collectives)
        shape = f' <font color="#777777">{shape}</font>' if shape else ""
        label = f"<b>{name}</b>{weights}<br/>{made}{shape}{inner}"
        self.picture.add_node(f"n{node.id}", label=f"<{label}>", fillcolor=_COLOURS[type(layout)])

    def _edges(self, node: Node) -> None:
        read = {leaf for form in (node.args, node.kwargs) for leaf in leaves(form)}
        for ref, layout in self.plan.node(node.id).inputs:
            if ref not in read:
                continue  # only its size is read
            source = self.graph.nodes[ref.node]
            if ref.node not in self.inside:
                name = f"s{ref.node}"
                label = source.name.removeprefix(f"{self.scope}.") if source.is_source else f"from {source.name}"
                self.picture.add_node(name, label=f"{label}\n{layout_text(self.plan.produced(ref))}", shape="note",
                                      fillcolor=_COLOURS[type(self.plan.produced(ref))])  # fmt: skip
            self._edge(
                f"n{ref.node}" if ref.node in self.inside else f"s{ref.node}", f"n{node.id}",
                self.moves.get((ref, layout)), layout,
            )  # fmt: skip

    def _edge(self, source: str, target: str, move: Move | None, layout: Layout) -> None:
        forward, backward = move.collectives if move is not None else ("", "")
        text = [forward] if forward else []
        text += [f"▲ {backward}"] if backward else []
        if text:
            self.picture.add_edge(
                source,
                target,
                label="\n".join(f"  {one}  " for one in text),
                color=_RED,
                fontcolor=_RED,
                penwidth="1.8",
            )
        elif move is not None:
            self.picture.add_edge(source, target, label=layout_text(layout), style="dashed")
        else:
            self.picture.add_edge(source, target)

    def _legend(self) -> None:
        rows = "".join(
            f'<tr><td bgcolor="{_COLOURS[kind]}">{word}</td></tr>' for kind, word in _WORDS.items()
        )  # fmt: skip
        note = f'<tr><td><font color="{_RED}">red: a collective, ▲ of the gradient</font></td></tr>'
        dashed = "<tr><td>dashed: another layout, without a collective</td></tr>"
        table = f'<table border="0" cellborder="1" cellspacing="0">{rows}{note}{dashed}</table>'
        self.picture.add_node("legend", label=f"<{table}>", shape="plain", fillcolor="white")
