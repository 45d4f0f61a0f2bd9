// Behaviour of the page: zoom, pan, highlight a micro-batch, show the facts of a block.
function look(begin, end) {
  const least = END / 1e5, long = Math.min(Math.max(end - begin, least), END);
  from = Math.min(Math.max(begin, 0), END - long);
  to = from + long;
  draw();
}

function zoom(factor, around) {
  const centre = around === undefined ? (from + to) / 2 : Math.min(Math.max(around, 0), END);
  look(centre - (centre - from) * factor, centre + (to - centre) * factor);
}

function blockAt(event) {
  const box = rows.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top - 8;
  const device = Math.floor(py / PITCH);
  if (device < 0 || device >= PLAN.ndevs || py - device * PITCH > BAR || px < LEFT || px > LEFT + width()) return -1;
  const now = time(px), list = PLAN.rows[device].blocks;
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1, block = PLAN.blocks[list[middle]];
    if (block[START] + block[SPAN] <= now) low = middle + 1; else high = middle;
  }
  return low < list.length && PLAN.blocks[list[low]][START] <= now ? list[low] : -1;
}

function tell(event) {
  card.hidden = pointed < 0;
  if (pointed < 0) return;
  const block = PLAN.blocks[pointed], names = list => list.map(at => PLAN.blocks[at][NAME]).join(', ') || 'nothing';
  const sign = block[MEMORY] > 0 ? '+' : '', several = block[DEVICES].length > 1;
  const sums = held.get(pointed).map(([device, sum]) => number(sum) + (several ? ' on ' + device : ''));
  const facts = [
    ['kind', PLAN.kinds[block[KIND]]], ['stage', block[STAGE]], ['micro-batch', block[MID]],
    [several ? 'devices' : 'device', block[DEVICES].join(', ')],
    ['time', number(block[START]) + ' – ' + number(block[START] + block[SPAN]) + ' (' + number(block[SPAN]) + ')'],
    ['memory', sign + number(block[MEMORY]) + ', then ' + sums.join(', ')],
    ['needs', names(block[BEFORE])], ['needed by', names(after[pointed])]];
  card.replaceChildren();
  const name = document.createElement('b');
  name.textContent = block[NAME];
  const table = document.createElement('table');
  for (const [key, value] of facts) {
    const line = table.insertRow(), head = document.createElement('th');
    head.textContent = key;
    line.append(head);
    line.insertCell().textContent = value;
  }
  card.append(name, table);
  const box = card.getBoundingClientRect();
  card.style.left = Math.max(8, Math.min(event.clientX + 16, innerWidth - box.width - 8)) + 'px';
  const below = event.clientY + 20;
  card.style.top = (below + box.height > innerHeight ? event.clientY - box.height - 12 : below) + 'px';
}

let drag = null;
rows.addEventListener('pointerdown', event => {
  if (event.button) return;
  drag = {x: event.clientX, from, moved: false};
  rows.setPointerCapture(event.pointerId);
});
rows.addEventListener('pointermove', event => {
  if (drag) {
    drag.moved = drag.moved || Math.abs(event.clientX - drag.x) > 3;
    rows.classList.toggle('dragged', drag.moved);
    const begin = drag.from - (event.clientX - drag.x) / width() * (to - from);
    if (drag.moved) look(begin, begin + (to - from));
    return;
  }
  const now = blockAt(event);
  if (now !== pointed) { pointed = now; draw(); }
  tell(event);
});
rows.addEventListener('pointerup', event => {
  if (drag && !drag.moved) {
    const now = blockAt(event);
    kept = now >= 0 && kept !== PLAN.blocks[now][MID] ? PLAN.blocks[now][MID] : -1;
    draw();
  }
  drag = null;
  rows.classList.remove('dragged');
});
rows.addEventListener('pointercancel', () => { drag = null; rows.classList.remove('dragged'); });
rows.addEventListener('pointerleave', () => { if (!drag) { pointed = -1; card.hidden = true; draw(); } });
rows.addEventListener('dblclick', () => look(0, END));
for (const canvas of [rows, axis]) canvas.addEventListener('wheel', event => {
  const sideways = event.deltaX || (event.shiftKey ? event.deltaY : 0);
  const place = event.clientX - canvas.getBoundingClientRect().left;
  if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY * .004), time(place));
  else if (sideways) { const by = sideways / width() * (to - from); look(from + by, to + by); }
  else return;                        // plain wheel scrolls the page
  event.preventDefault();
}, {passive: false});
document.addEventListener('keydown', event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const by = (to - from) / 8;
  const keys = {'+': () => zoom(.7), '=': () => zoom(.7), '-': () => zoom(1 / .7), '0': () => look(0, END),
                'ArrowLeft': () => look(from - by, to - by), 'ArrowRight': () => look(from + by, to + by),
                'Escape': () => { kept = -1; draw(); }};
  if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
});
document.getElementById('in').addEventListener('click', () => zoom(.6));
document.getElementById('out').addEventListener('click', () => zoom(1 / .6));
document.getElementById('fit').addEventListener('click', () => look(0, END));
addEventListener('resize', draw);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
draw();
