'use strict';
// Painting of the page: the axis with the phases, and the visible part of the rows.
const NAME = 0, KIND = 1, SHADE = 2, STAGE = 3, MID = 4, START = 5, SPAN = 6, MEMORY = 7, DEVICES = 8, BEFORE = 9;
const DARK = 2, OTHER = 3;
const axis = document.getElementById('axis'), rows = document.getElementById('rows');
const card = document.getElementById('facts');
const crowded = PLAN.ndevs > 12;
const LEFT = 78, RIGHT = PLAN.range ? 92 : 16, TOP = PLAN.kernel ? 56 : 28;
const BAR = crowded ? 18 : 30, GAP = PLAN.range ? 3 : 0, HELD = PLAN.range ? (crowded ? 12 : 20) : 0;
const PITCH = BAR + GAP + HELD + (crowded ? 8 : 16);
const END = PLAN.end || 1;
let from = 0, to = END;               // the time in view
let pointed = -1, kept = -1;          // block under the pointer, micro-batch kept lit
let wanted = false;

const held = new Map();               // block → what each of its devices holds once it has started
PLAN.rows.forEach((row, device) => {
  let sum = 0;
  for (const at of row.blocks) {
    sum = (PLAN.keeps ? sum : 0) + PLAN.blocks[at][MEMORY];
    if (!held.has(at)) held.set(at, []);
    held.get(at).push([device, sum]);
  }
});
const after = PLAN.blocks.map(() => []);
PLAN.blocks.forEach((block, at) => block[BEFORE].forEach(prev => after[prev].push(at)));

let theme = {};
const colour = name => theme[name];
function readTheme() {                // asking the style sheet for every block would cost more than drawing it
  const style = getComputedStyle(document.documentElement);
  const names = ['paper', 'ink', 'faint', 'line', 'idle', 'hatch', 'memory', 'memory-edge', 'limit', 'ramp', 'steady',
                 'repetend'];
  for (const name of names) theme[name] = style.getPropertyValue('--' + name).trim();
}
const number = value => Number(value.toPrecision(6)).toString();
const width = () => Math.max(rows.clientWidth - LEFT - RIGHT, 50);
const x = time => LEFT + (time - from) / (to - from) * width();
const time = pixel => from + (pixel - LEFT) / width() * (to - from);

function prepared(canvas, height) {
  const ratio = window.devicePixelRatio || 1, wide = canvas.clientWidth;
  canvas.style.height = height + 'px';
  if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext('2d');
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, wide, height);
  pen.textBaseline = 'middle';
  return pen;
}

function inTimeArea(pen, height, work) {
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 0, width(), height);
  pen.clip();
  work();
  pen.restore();
}

function sans(size) { return size + 'px system-ui, "Segoe UI", Roboto, Arial, sans-serif'; }

function tickStep() {
  const rough = (to - from) / (width() / 80), power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map(k => k * power).find(step => step >= rough);
}

function drawAxis() {
  const pen = prepared(axis, TOP);
  inTimeArea(pen, TOP, () => {
    for (const [name, begin, end] of PLAN.sections) {
      const left = Math.max(x(begin), LEFT), right = Math.min(x(end), LEFT + width());
      if (right <= left) continue;
      pen.fillStyle = colour(name === 'steady state' ? 'steady' : 'ramp');
      pen.fillRect(left, 0, right - left, 24);
      pen.fillStyle = colour('ink');
      pen.font = sans(12);
      pen.textAlign = 'center';
      const k = PLAN.kernel;
      const texts = name !== 'steady state' ? [name] : [
        'repetend × ' + k.count + ' · ' + number(k.length) + ' each' +
          (k.nmicros > 1 ? ' for ' + k.nmicros + ' micro-batches' : ''), 'repetend × ' + k.count, '× ' + k.count];
      const text = texts.find(text => pen.measureText(text).width + 12 < right - left);
      if (text) pen.fillText(text, (left + right) / 2, 12.5);
    }
    if (PLAN.kernel) {
      const k = PLAN.kernel;
      pen.strokeStyle = colour('ink');
      pen.lineWidth = 1;
      if (x(k.length) - x(0) > 6) for (let i = 1; i < k.count; i++) {
        const at = Math.round(x(k.begin + i * k.length)) + .5;
        pen.beginPath(); pen.moveTo(at, 20); pen.lineTo(at, 24); pen.stroke();
      }
    }
  });
  pen.strokeStyle = colour('line');
  pen.fillStyle = colour('faint');
  pen.font = sans(11.5);
  pen.textAlign = 'center';
  pen.beginPath();
  pen.moveTo(LEFT, TOP - .5); pen.lineTo(LEFT + width(), TOP - .5);
  const step = tickStep();
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to + 1e-9 * END; k++) {
    const at = Math.round(x(k * step)) + .5;
    pen.moveTo(at, TOP - 6); pen.lineTo(at, TOP);
    pen.fillText(number(k * step), at, TOP - 15);
  }
  pen.stroke();
}

function hatching(pen) {
  const tile = document.createElement('canvas'), ratio = window.devicePixelRatio || 1;
  tile.width = tile.height = Math.round(7 * ratio);
  const mark = tile.getContext('2d');
  mark.strokeStyle = colour('hatch');
  mark.lineWidth = ratio;
  mark.beginPath();
  for (const shift of [-1, 0, 1]) {
    mark.moveTo(tile.width * (shift - .5), tile.height * 1.5);
    mark.lineTo(tile.width * (shift + 1.5), -tile.height * .5);
  }
  mark.stroke();
  const pattern = pen.createPattern(tile, 'repeat');
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

function firstInView(list, endOf) {   // lists are in order of time
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (endOf(list[middle]) <= from) low = middle + 1; else high = middle;
  }
  return low;
}

function drawRow(pen, device, pattern) {
  const row = PLAN.rows[device], top = device * PITCH + 8;
  for (let i = firstInView(row.idle, gap => gap[1]); i < row.idle.length && row.idle[i][0] < to; i++) {
    const left = Math.max(x(row.idle[i][0]), LEFT), right = Math.min(x(row.idle[i][1]), LEFT + width());
    pen.fillStyle = colour('idle'); pen.fillRect(left, top, right - left, BAR);
    pen.fillStyle = pattern; pen.fillRect(left, top, right - left, BAR);
  }
  const lit = kept >= 0 ? kept : pointed >= 0 ? PLAN.blocks[pointed][MID] : -1;
  const start = firstInView(row.blocks, at => PLAN.blocks[at][START] + PLAN.blocks[at][SPAN]);
  for (let i = start; i < row.blocks.length; i++) {
    const at = row.blocks[i], block = PLAN.blocks[at];
    if (block[START] >= to) break;
    drawBlock(pen, block, at, top, lit);
  }
}

function drawBlock(pen, block, at, top, lit) {
  const left = x(block[START]), right = x(block[START] + block[SPAN]);
  const tones = PLAN.colours[block[MID] % PLAN.colours.length];
  const inset = right - left > 4 ? .5 : 0;
  pen.fillStyle = colour('paper');
  pen.fillRect(left, top, right - left, BAR);
  pen.globalAlpha = lit < 0 || lit === block[MID] ? 1 : .3;
  pen.fillStyle = block[SHADE] === OTHER ? '#ffffff' : tones[block[SHADE]];
  pen.fillRect(left + inset, top, Math.max(right - left - 2 * inset, .5), BAR);
  if (block[SHADE] === OTHER || at === pointed) {
    pen.strokeStyle = at === pointed ? colour('ink') : tones[DARK];
    pen.lineWidth = at === pointed ? 2 : 1;
    pen.strokeRect(left + 1, top + 1, Math.max(right - left - 2, .5), BAR - 2);
  }
  const space = Math.min(right, LEFT + width()) - Math.max(left, LEFT);
  if (right - left > 12 && space > 12) {
    pen.font = sans(crowded ? 10.5 : 12);
    const text = [block[NAME], String(block[MID])].find(text => pen.measureText(text).width + 5 < space);
    if (text) {
      pen.fillStyle = block[SHADE] === DARK ? '#ffffff' : '#1f2328';
      pen.textAlign = 'center';
      pen.fillText(text, Math.max(left, LEFT) + space / 2, top + BAR / 2 + .5);
    }
  }
  pen.globalAlpha = 1;
}

function drawMemory(pen, device) {
  const row = PLAN.rows[device], [low, high] = PLAN.range, scale = HELD / ((high - low) || 1);
  const floor = device * PITCH + 8 + BAR + GAP + HELD + low * scale;
  const points = [];
  let level = floor;
  for (let i = Math.max(firstInView(row.memory, step => step[0]) - 1, 0); i < row.memory.length; i++) {
    const [at, value] = row.memory[i];
    if (at > to) break;
    points.push([x(at), level]);
    level = floor - value * scale;
    points.push([x(at), level]);
  }
  points.push([x(END), level]);
  pen.beginPath();
  pen.moveTo(points[0][0], floor);
  points.forEach(point => pen.lineTo(...point));
  pen.lineTo(x(END), floor);
  pen.fillStyle = colour('memory');
  pen.fill();
  pen.beginPath();
  points.forEach(point => pen.lineTo(...point));
  pen.strokeStyle = colour('memory-edge');
  pen.lineWidth = 1;
  pen.stroke();
  if (row.limit === null) return;
  pen.beginPath();
  pen.setLineDash([5, 4]);
  pen.moveTo(x(0), floor - row.limit * scale);
  pen.lineTo(x(END), floor - row.limit * scale);
  pen.strokeStyle = colour('limit');
  pen.stroke();
  pen.setLineDash([]);
}

function drawRows() {
  const height = PLAN.ndevs * PITCH + 8, pen = prepared(rows, height);
  const pattern = hatching(pen);
  inTimeArea(pen, height, () => {
    if (PLAN.kernel) {
      const k = PLAN.kernel;
      pen.fillStyle = colour('repetend');
      pen.fillRect(x(k.begin), 0, x(k.begin + k.length) - x(k.begin), height);
      pen.strokeStyle = colour('ink');
      pen.lineWidth = 1;
      pen.setLineDash([6, 4]);
      for (const at of [k.begin, k.begin + k.count * k.length]) {
        const place = Math.round(x(at)) + .5;
        pen.beginPath(); pen.moveTo(place, 0); pen.lineTo(place, height); pen.stroke();
      }
      pen.setLineDash([]);
    }
    for (let device = 0; device < PLAN.ndevs; device++) {
      drawRow(pen, device, pattern);
      if (PLAN.range) drawMemory(pen, device);
    }
  });
  pen.font = sans(crowded ? 11.5 : 13);
  PLAN.rows.forEach((row, device) => {
    const top = device * PITCH + 8;
    pen.fillStyle = colour('ink');
    pen.textAlign = 'right';
    pen.fillText('device ' + device, LEFT - 10, top + BAR / 2 + .5);
    if (!PLAN.range) return;
    pen.fillStyle = colour('faint');
    pen.textAlign = 'left';
    const limit = row.limit === null ? '' : ' of ' + number(row.limit);
    pen.fillText('peak ' + number(row.peak) + limit, LEFT + width() + 8, top + BAR + GAP + HELD / 2 + .5, RIGHT - 10);
  });
}

function draw() {
  if (wanted) return;
  wanted = true;
  requestAnimationFrame(() => { wanted = false; readTheme(); drawAxis(); drawRows(); });
}
