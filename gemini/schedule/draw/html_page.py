"""A schedule as one page of HTML: self-contained, for light and dark mode.

The page holds the plan as data and draws only the visible part of it on a canvas, so it stays
smooth with tens of thousands of blocks. `assets/paint.js` draws, `assets/control.js` handles mouse and keys.
"""

from __future__ import annotations

import html
import json
from importlib import resources

from gemini.schedule.draw import palette
from gemini.schedule.draw.timeline import Timeline, shade

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<dl>{facts}</dl>
<div class="tools">
<button id="out" title="Zoom out (−)" aria-label="Zoom out">−</button>
<button id="in" title="Zoom in (+)" aria-label="Zoom in">+</button>
<button id="fit" title="The whole schedule (0)">Fit</button>
</div>
</header>
<p class="keys">{legend}<span class="hint">Ctrl + wheel zooms · drag pans · click keeps a micro-batch lit · \
keys + − 0 ← →</span></p>
<main>
<canvas id="axis" aria-hidden="true"></canvas>
<canvas id="rows" role="img" tabindex="0" aria-label="{title}: {spoken}"></canvas>
</main>
<div id="facts" role="status" hidden></div>
<noscript>This picture is drawn by JavaScript.</noscript>
<script>const PLAN = {plan};
{script}</script>
</body>
</html>
"""


def render_page(picture: Timeline) -> str:
    """The picture as a self-contained page."""
    facts = "".join(f"<div><dt>{name}</dt><dd>{html.escape(value)}</dd></div>" for name, value in picture.headline)
    return _PAGE.format(
        title=html.escape(picture.title),
        style=_read_asset("style.css"),
        facts=facts,
        spoken=html.escape(", ".join(f"{name} {value}" for name, value in picture.headline), quote=True),
        legend=_legend(picture),
        plan=_as_script(_data(picture)),
        script=_read_asset("paint.js") + _read_asset("control.js"),
    )


def _as_script(value: object) -> str:
    """Return JSON that cannot end the enclosing script element, whatever names it contains."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _data(picture: Timeline) -> dict[str, object]:
    plan = picture.plan
    position = {block: index for index, block in enumerate(plan)}
    kinds = sorted({block.btype for block in plan})
    return {
        "ndevs": plan.ndevs,
        "end": picture.end,
        "keeps": plan.keeps_memory,
        "kinds": [kind.replace("_", " ") for kind in kinds],
        "blocks": [
            [
                str(block),
                kinds.index(block.btype),
                shade(block),
                block.action.stage,
                block.mid,
                plan.step(block),
                block.span,
                block.memory,
                plan.device(block),
                [position[prev] for prev in block.before if prev in position],
            ]
            for block in plan
        ],
        "rows": [
            {"blocks": [position[block] for block in row.blocks], "idle": row.idle, "memory": row.memory}
            | {"peak": row.peak, "limit": row.limit}
            for row in picture.rows
        ],
        "range": picture.memory_range if picture.shows_memory else None,
        "sections": picture.sections,
        "kernel": _kernel(picture),
        "colours": palette.MICRO_BATCHES,
    }


def _kernel(picture: Timeline) -> dict[str, object] | None:
    phases = picture.phases
    if phases is None:
        return None
    return {"begin": phases.begin, "length": phases.length, "count": phases.kernels, "nmicros": phases.nmicros}


def _legend(picture: Timeline) -> str:
    kinds = {block.btype: shade(block) for block in picture.plan}
    items = []
    for kind, tone in sorted(kinds.items(), key=lambda item: (item[1], item[0])):
        look = f"background:{palette.NEUTRAL[tone]}" + (";outline:1px solid" if tone == palette.OTHER else "")
        items.append(f'<span><i style="{look}"></i>{html.escape(kind.replace("_", " "))}</span>')
    items.append('<span><i class="idle"></i>idle</span>')
    if picture.shows_memory:
        items.append('<span><i class="memory"></i>memory</span>')
    if any(row.limit is not None for row in picture.rows):
        items.append('<span><i class="limit"></i>memory limit</span>')
    return "".join(items)


def _read_asset(name: str) -> str:
    return (resources.files("gemini.schedule.draw") / "assets" / name).read_text(encoding="utf-8")
