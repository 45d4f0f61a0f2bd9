"""Draw the syntax tree of a script; recognised nodes are coloured.

gemini ast train.py -o ast.svg
gemini ast train.py --after -o after.png                       after all passes, changes marked
gemini ast train.py --after device-placement -o after.png      after one pass and its needs
gemini ast model.py --max-nodes 200 -o model.svg               fold more
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gemini.errors import InstrumentError, UsageError

if TYPE_CHECKING:
    from gemini.instrument.inspect.ast_outline import Place
    from gemini.instrument.text.source_file import SourceFile

SUMMARY = "draw the syntax tree of a script, before or after a pass (.svg, .png, .dot)"
_ALL = "all passes"
_MOST_BOXES = 400
_DEEPEST = 8000  # Python frames; fits the stack of every supported Python


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini ast`."""
    parser.add_argument("script", help="the Python file")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="ends in .svg, .png or .dot")
    parser.add_argument(
        "--after", nargs="?", const=_ALL, metavar="PASS", help="after all passes, or after this one; changes are marked"
    )
    parser.add_argument("--depth", type=_positive, metavar="N", help="fold nodes nested deeper than N")
    parser.add_argument(
        "--max-nodes", type=_positive, metavar="N",
        help=f"fold unrecognised nodes until about N boxes are left (default {_MOST_BOXES}; with --full, all)",
    )  # fmt: skip
    parser.add_argument("--full", action="store_true", help="draw a box for every expression")


def run(args: argparse.Namespace) -> int:
    """Draw the picture."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _DEEPEST))  # tree walks recurse
    try:
        return _draw(args)
    except RecursionError:
        raise InstrumentError(
            f"{args.script} is nested too deeply to be drawn\n    → gemini inspect lists its findings"
        ) from None
    finally:
        sys.setrecursionlimit(limit)


def _draw(args: argparse.Namespace) -> int:
    from gemini import dot_render
    from gemini.cli.source_arguments import read_source
    from gemini.instrument.inspect.ast_folds import fold
    from gemini.instrument.inspect.ast_outline import outline
    from gemini.instrument.inspect.ast_picture import to_dot
    from gemini.instrument.passes.pass_input import Unit

    dot_render.check_suffix(args.output)
    source = read_source(args.script)
    changed: set[ast.AST] = set()
    note = "the syntax tree"
    if args.after is not None:
        source, changed = _after(source, args.after)
        note = f"the syntax tree after {args.after}"
    root = outline(Unit(source), _kinds(source), changed, title=args.script, full=args.full)
    most = args.max_nodes or (None if args.full else _MOST_BOXES)
    nodes = sum(1 for _ in ast.walk(source.tree))
    fold(root, depth=args.depth, most=most)
    dot_render.write(to_dot(root, title=Path(args.script).name, note=note), args.output)
    if args.after is not None and not changed:
        print("no pass changes this file", file=sys.stderr)
    print(f"{args.output}: {root.count - 1} boxes for {nodes} nodes")
    return 0


def _after(source: SourceFile, chosen: str) -> tuple[SourceFile, set[ast.AST]]:
    """Return the source after the passes, and the nodes that they added."""
    from gemini.instrument.output.new_nodes import find_new_nodes
    from gemini.instrument.pass_manager.manager import PassManager
    from gemini.instrument.pass_manager.registry import select

    passes = select() if chosen == _ALL else select([chosen])
    done = PassManager(passes, notice=lambda line: print(f"gemini ast: {line}", file=sys.stderr)).run(source)
    after = source.with_text(done.text)
    return after, find_new_nodes(done, after.tree)


def _kinds(source: SourceFile) -> dict[tuple[Place, bool], str]:
    """Return the kind of every recognised node, by position; of several kinds, the first in `KINDS`."""
    from gemini.instrument.inspect import KINDS, recognise

    order = list(KINDS)
    kinds: dict[tuple[Place, bool], str] = {}
    for finding in sorted(recognise([source]), key=lambda one: order.index(one.kind), reverse=True):
        place = (finding.line, finding.column, finding.end_line, finding.end_column)
        kinds[(place, finding.is_statement)] = finding.kind
    return kinds


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{text!r} is not a whole number above 0\n    → write a number such as 3")
    return int(text)
