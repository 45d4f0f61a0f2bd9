"""The look of the HTML page, for light and for dark surroundings."""

STYLE = """
:root {
  --paper: #ffffff; --ink: #1f2328; --faint: #656d76; --line: #d8dee4; --card: #ffffff;
  --idle: #f6f8fa; --hatch: #cdd3da; --memory: #c9d3e0; --memory-edge: #7b8aa0; --limit: #b3261e;
  --ramp: #e9edf2; --steady: #c9d6e8; --repetend: #e3ebf6; --shadow: 0 4px 16px rgba(31, 35, 40, .16);
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181d; --ink: #e6edf3; --faint: #9aa4af; --line: #333b45; --card: #1f252c;
    --idle: #1a1f26; --hatch: #363f4a; --memory: #38465a; --memory-edge: #8497b3; --limit: #ff8a80;
    --ramp: #232a33; --steady: #31415a; --repetend: #1d2735; --shadow: 0 4px 20px rgba(0, 0, 0, .5);
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: 20px 24px 32px; background: var(--paper); color: var(--ink);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 32px; }
h1 { margin: 0; font-size: 20px; font-weight: 650; letter-spacing: -.01em; }
dl { display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 0; }
dl div { display: flex; gap: 6px; }
dt { color: var(--faint); }
dd { margin: 0; font-variant-numeric: tabular-nums; font-weight: 550; }
.tools { margin-left: auto; display: flex; gap: 6px; }
button {
  min-width: 32px; height: 28px; padding: 0 10px; border: 1px solid var(--line); border-radius: 6px;
  background: var(--card); color: var(--ink); font: inherit; line-height: 1; cursor: pointer;
}
button:hover { border-color: var(--faint); }
button:focus-visible, canvas:focus-visible { outline: 2px solid #61a1f0; outline-offset: 2px; }
.keys { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 10px 0 12px; color: var(--faint); font-size: 12.5px; }
.keys span { display: inline-flex; align-items: center; gap: 6px; }
.keys i { width: 16px; height: 11px; border-radius: 2px; display: inline-block; }
.keys .idle { background: repeating-linear-gradient(135deg, var(--hatch) 0 1px, var(--idle) 1px 4px); }
.keys .memory { background: var(--memory); }
.keys .limit { height: 0; border-top: 2px dashed var(--limit); border-radius: 0; }
.keys .hint { margin-left: auto; }
canvas { display: block; width: 100%; }
#axis { position: sticky; top: 0; z-index: 1; background: var(--paper); }
#rows { cursor: grab; touch-action: pan-y; }
#rows.dragged { cursor: grabbing; }
#facts {
  position: fixed; z-index: 2; pointer-events: none; max-width: 320px; padding: 10px 12px;
  border: 1px solid var(--line); border-radius: 8px; background: var(--card); box-shadow: var(--shadow);
  font-size: 12.5px;
}
#facts b { font-size: 14px; }
#facts table { border-collapse: collapse; margin-top: 4px; }
#facts th { padding: 0 12px 0 0; color: var(--faint); font-weight: 400; text-align: left; vertical-align: top; }
#facts td { padding: 0; font-variant-numeric: tabular-nums; }
@media print { .tools, .hint { display: none !important; } }
"""
