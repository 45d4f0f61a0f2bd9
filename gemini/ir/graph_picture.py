"""Graph picture: the graph drawn with Graphviz, clustered by module scope and coloured by stage.

`fold` is the number of scope levels shown: each deeper scope is one box labelled with its number of nodes. Large
graphs fold by default. With stages, a scope that several stages share has one box per stage, and edges between stages
are red.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.dot_render import without_font_warnings
from gemini.errors import MissingEngineError

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.ir.node import Node

PALETTE = (
    "#cfe8ff", "#ffe3c2", "#d5f2d0", "#f4d3e8", "#fff3b0", "#d9d2f2", "#c9f0ee", "#f2d2cf",
    "#b9c6ea", "#e3eda0", "#e2d0bd", "#ffc2a8",
)  # fmt: skip
_SHAPES = {"input": "oval", "parameter": "note", "buffer": "note", "attribute": "note", "block": "box3d"}
_CUT = "#b3261e"
_TITLE = {"fontname": "Helvetica", "fontsize": "10", "fontcolor": "#555555", "labeljust": "l"}
_MANY = 250


def draw_graph(
    graph: Graph, path: str | Path, stages: Mapping[int, int] | Sequence[int] | None = None, fold: int | None = None
) -> None:
    """Write a picture in the format of the suffix of `path` (svg, pdf, png, dot)."""
    try:
        import pygraphviz
    except ImportError:
        raise MissingEngineError("pygraphviz", "viz", "drawing a graph") from None
    stage_of = dict(enumerate(stages)) if isinstance(stages, Sequence) else dict(stages or {})
    fold = fold if fold is not None else fold_for(graph)
    picture = pygraphviz.AGraph(directed=True, strict=True, rankdir="TB", compound=True)
    picture.node_attr.update(
        shape="box", style="rounded,filled", fillcolor="#f4f4f4", fontname="Helvetica", fontsize="10"
    )
    box_of = _box_names(graph, fold, stage_of)
    boxes: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.kind not in ("parameter", "buffer", "attribute"):
            boxes.setdefault(box_of[node.id], []).append(node)
    for name, nodes in boxes.items():
        colour = _colour(nodes, stage_of)
        label = _label(name, nodes, fold, stage_of)
        picture.add_node(name, label=label, shape=_SHAPES.get(nodes[0].kind, "box"), fillcolor=colour)
    _clusters(picture, boxes, fold)
    for producer, consumer, ref in graph.edges():
        a, b = box_of[producer], box_of[consumer]
        if a != b and a in boxes and b in boxes:
            cut = stage_of.get(producer) != stage_of.get(consumer) and producer in stage_of
            style = {"color": _CUT, "penwidth": "1.6"} if cut else {}
            meta = graph.nodes[ref.node].outputs.get((ref.source, ref.path))  # None: not a tensor
            picture.add_edge(a, b, tooltip="object" if meta is None else str(list(meta.shape)), **style)
    _legend(picture, sorted(set(stage_of.values())))
    with without_font_warnings():
        picture.draw(str(path), prog="dot")


def _legend(picture: Any, stages: list[Any]) -> None:
    if len(stages) < 2:
        return
    names = [f"stage {stage}" for stage in stages]
    for stage, name in zip(stages, names, strict=True):
        picture.add_node(f" {name}", label=name, fillcolor=PALETTE[int(stage) % len(PALETTE)])
    for one, other in pairwise(names):
        picture.add_edge(f" {one}", f" {other}", style="invis")  # one below the other
    boxes = [f" {name}" for name in names]
    picture.add_subgraph(boxes, name="cluster_ stages", label="red: from stage to stage", color="#ffffff", **_TITLE)


def fold_for(graph: Graph, most: int = _MANY) -> int:
    """Return the deepest fold with a readable number of boxes."""
    deepest = max((len(_levels(node)) for node in graph.nodes), default=1)
    for fold in range(deepest + 1, 1, -1):
        if len({_box(node, fold) for node in graph.compute_nodes}) <= most:
            return fold
    return 1


def _levels(node: Node) -> list[str]:
    """Return the scopes of a node, outermost first, without the model itself."""
    return [scope for scope in node.scope if scope]


def _box(node: Node, fold: int) -> str:
    levels = _levels(node)
    return levels[fold - 1] if len(levels) >= fold else f"{node.name} "


def _box_names(graph: Graph, fold: int, stage_of: dict[int, Any]) -> dict[int, str]:
    """Return the box of each node; a scope that several stages share has one per stage."""
    stages: dict[str, set[Any]] = {}
    for node in graph.nodes:
        stages.setdefault(_box(node, fold), set()).add(stage_of.get(node.id))
    names = {node.id: _box(node, fold) for node in graph.nodes}
    return {node: f"{name}@{stage_of.get(node)}" if len(stages[name]) > 1 else name for node, name in names.items()}


def _label(name: str, nodes: list[Node], fold: int, stage_of: dict[int, Any]) -> str:
    if name.endswith(" "):
        node = nodes[0]
        shape = next((list(meta.shape) for meta in node.outputs.values()), None)
        title = f"{node.name.rpartition('.')[2]}\\n{node.cls}" if node.cls else node.name.rpartition(".")[2]
        return f"{title}\\n{shape}" if shape is not None else title
    count = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"
    stage = stage_of.get(nodes[0].id)
    return f"{_levels(nodes[0])[fold - 1]}\\n{count}" + (f", stage {stage}" if stage is not None else "")


def _colour(nodes: list[Node], stage_of: dict[int, Any]) -> str:
    found = {stage_of[node.id] for node in nodes if node.id in stage_of}
    if len(found) == 1:
        return PALETTE[int(found.pop()) % len(PALETTE)]
    return "#ffffff" if found else "#f4f4f4"


def _clusters(picture: Any, boxes: dict[str, list[Node]], fold: int) -> None:
    """Add one nested cluster per scope with more than one box."""
    members: dict[tuple[str, ...], list[str]] = {}
    for name, nodes in boxes.items():
        levels = _levels(nodes[0])
        if not name.endswith(" "):
            levels = levels[: fold - 1]
        for count in range(1, len(levels) + 1):
            members.setdefault(tuple(levels[:count]), []).append(name)
    made: dict[tuple[str, ...], Any] = {(): picture}
    for scopes in sorted(members, key=len):
        around = next(scopes[:count] for count in range(len(scopes) - 1, -1, -1) if scopes[:count] in made)
        label = scopes[-1].removeprefix(f"{around[-1]}." if around else "")
        made[scopes] = made[around].add_subgraph(
            members[scopes], name=f"cluster_{'/'.join(scopes)}", label=label, color="#bbbbbb", **_TITLE
        )
