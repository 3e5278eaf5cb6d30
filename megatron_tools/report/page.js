"use strict";
// Draws the charts of a page from the data in its script elements.
const NS = "http://www.w3.org/2000/svg", MARKED = new Set(["dots", "squares"]), DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const state = { x: "iteration", smooth: 0, hidden: new Set(), log: {}, zoom: null };
const root = document.documentElement, tip = document.getElementById("tip"), page = document.getElementById("page");
let about = null, drawn = [];

function make(name, attributes, parent) {
  const found = document.createElementNS(NS, name);
  for (const key in attributes) found.setAttribute(key, attributes[key]);
  if (parent) parent.append(found);
  return found;
}

function format(v) {
  const a = Math.abs(v);
  if (a === 0) return "0";
  if (a >= 1e12) return v.toExponential(1).replace(".0e", "e").replace("e+", "e");
  if (a >= 1e9) return +(v / 1e9).toPrecision(3) + "G";
  if (a >= 1e6) return +(v / 1e6).toPrecision(3) + "M";
  if (a >= 1e4) return +(v / 1e3).toPrecision(3) + "k";
  if (a >= 100) return String(+v.toPrecision(4));
  if (a >= 1e-3) return String(+v.toPrecision(3));
  return v.toExponential(1).replace(".0e", "e");
}

// A value of the tooltip, with all digits that tell two runs apart.
function exact(v) {
  const a = Math.abs(v);
  return a >= 1e12 || a && a < 1e-3 ? v.toPrecision(5) : a >= 1e4 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(6));
}

function ticks(low, high, log, most) {
  if (log) {
    const found = [], wide = Math.log10(high / low);
    const parts = wide > 4 ? [1] : wide > 1.7 ? [1, 3] : wide > 0.6 ? [1, 2, 5] : [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
      for (const p of parts) { const v = p * 10 ** e; if (v >= low && v <= high) found.push(v); }
    while (found.length > most + 2) for (let i = found.length - 1; i > 0; i -= 2) found.splice(i, 1);
    return found.length > 1 ? found : [low, high];
  }
  const raw = (high - low) / most, size = 10 ** Math.floor(Math.log10(raw));
  const step = size * [1, 2, 5, 10].find(k => k * size >= raw - 1e-12 * size), found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) found.push(+v.toPrecision(12));
  return found;
}

// Position of an iteration of a run on the selected axis.
function at(run, iteration) {
  if (state.x === "iteration") return iteration;
  const x = about.axes[run].iteration, y = about.axes[run][state.x];
  if (x.length < 2) return 0;
  let low = 0, high = x.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (x[mid] <= iteration) low = mid; else high = mid; }
  return y[low] + (y[high] - y[low]) * (iteration - x[low]) / (x[high] - x[low]);
}

function smoothed(y) {
  let sum = 0, weight = 0;
  return y.map(v => {
    if (v === null) return null;
    sum = state.smooth * sum + (1 - state.smooth) * v;
    weight = state.smooth * weight + 1 - state.smooth;
    return sum / weight;
  });
}

function lineOf(figure, spec) {
  const kinds = [...new Set(spec.lines.map(l => l.label))], several = new Set(spec.lines.map(l => l.run)).size > 1;
  return spec.lines.filter(l => !state.hidden.has(l.run)).map(l => {
    const one = about.names.length === 1 || (l.kind === "parts" && !several);  // colours are for labels, else for runs
    const dash = l.kind === "dashed" ? "6 4" : l.kind === "parts" && several ? DASHES[kinds.indexOf(l.label) % 4] : "";
    const xs = l.x.map(x => at(l.run, x));
    const smooth = state.smooth > 0 && (l.kind === "raw" || l.kind === "plain");
    return { ...l, one, dash, xs, ys: smooth ? smoothed(l.y) : l.y, raw: smooth ? l.y : null,
      colour: `var(--c${(one ? kinds.indexOf(l.label) : l.run) % 8})` };
  });
}

function path(xs, ys, sx, sy) {
  let d = "", pen = false;
  for (let i = 0; i < xs.length; i++) {
    if (ys[i] === null || !isFinite(sy(ys[i]))) { pen = false; continue; }
    d += `${pen ? "L" : "M"}${sx(xs[i]).toFixed(1)} ${sy(ys[i]).toFixed(1)}`;
    pen = true;
  }
  return d;
}

function range(lines, spec, log, window) {
  let low = Infinity, high = -Infinity;
  const see = y => { if (y !== null && (!log || y > 0)) { low = Math.min(low, y); high = Math.max(high, y); } };
  for (const l of lines) l.xs.forEach((x, i) => { if (x >= window[0] && x <= window[1]) { see(l.ys[i]); if (l.raw && l.kind !== "raw") see(l.raw[i]); } });
  if (low === Infinity) return [log ? 1 : 0, log ? 10 : 1];
  if (!state.zoom) for (const v of spec.levels) if (v.run === null || !state.hidden.has(v.run)) see(v.y);
  if (log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
  if (spec.zero && low >= 0) return [0, high > 0 ? high * 1.06 : 1];
  const pad = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.05;
  return [low - pad, high + pad];
}

function head(figure, spec, log, lines) {
  const top = document.createElement("div");
  top.className = "top";
  const title = document.createElement("b"), unit = document.createElement("span"), button = document.createElement("button");
  title.textContent = spec.title; unit.textContent = spec.unit;
  button.textContent = "log"; button.setAttribute("aria-pressed", log); button.setAttribute("aria-label", `log axis: ${spec.title}`);
  button.onclick = () => { state.log[spec.name] = !log; drawAll(); };
  top.append(title, unit, button);
  figure.append(top);
  const styles = new Map(lines.map(l => [l.label, l]));
  if (styles.size < 2) return;
  const key = document.createElement("div");
  key.className = "key";
  for (const [label, l] of styles) {
    const item = document.createElement("span");
    const colour = l.one ? l.colour : "currentColor";
    const svg = make("svg", { width: 20, height: 9 }, item);
    stroke(make("line", { x1: 0, y1: 5, x2: 20, y2: 5 }, svg), l, colour);
    if (MARKED.has(l.kind)) point(l.kind, 10, 5, 3, colour, svg);
    item.append(label);
    key.append(item);
  }
  figure.append(key);
}

// Draws a point of a line: a square for kind "squares", else a circle.
function point(kind, x, y, r, colour, parent) {
  const style = `fill:${colour}`;
  if (kind === "squares") make("rect", { x: x - r, y: y - r, width: 2 * r, height: 2 * r, style }, parent);
  else make("circle", { cx: x, cy: y, r, style }, parent);
}
function stroke(element, l, colour) {
  const width = l.kind === "raw" ? 1.3 : l.kind === "plain" || l.kind === "parts" ? 1.6 : 2;
  element.setAttribute("style", `fill:none;stroke:${colour};stroke-width:${width};stroke-linejoin:round`);
  if (l.kind === "raw") element.setAttribute("opacity", state.smooth ? 0.9 : 0.6);
  if (l.dash) element.setAttribute("stroke-dasharray", l.dash);
  return element;
}

function draw(figure) {
  const data = figure.querySelector("script"), spec = figure.spec || (figure.spec = JSON.parse(data.textContent));
  figure.replaceChildren(data);
  const log = state.log[spec.name] ?? spec.log, lines = lineOf(figure, spec);
  head(figure, spec, log, lines);
  const w = Math.max(figure.clientWidth - 26, 180), h = spec.name === "loss" && w > 500 ? 300 : spec.name === "ppl" || spec.name === "loss" ? 281 : 170;
  const box = { l: 46, r: 8, t: 8, b: 24 };
  const svg = make("svg", { viewBox: `0 0 ${w} ${h}`, height: h, role: "img", "aria-label": spec.title }, figure);
  const all = lines.flatMap(l => l.xs);
  if (!all.length) return;
  const window_ = state.zoom || [Math.min(...lines.map(l => l.xs[0]), 0), Math.max(...lines.map(l => l.xs[l.xs.length - 1]))];
  if (window_[1] <= window_[0]) window_[1] = window_[0] + 1;
  const [low, high] = range(lines, spec, log, window_), f = log ? Math.log : v => v;
  const sx = x => box.l + (x - window_[0]) / (window_[1] - window_[0]) * (w - box.l - box.r);
  const sy = y => h - box.b - (f(y) - f(low)) / (f(high) - f(low)) * (h - box.t - box.b);
  for (const y of ticks(low, high, log, h > 200 ? 6 : 4)) {
    make("line", { x1: box.l, x2: w - box.r, y1: sy(y), y2: sy(y), class: "gridline" }, svg);
    make("text", { x: box.l - 6, y: sy(y) + 4, "text-anchor": "end" }, svg).textContent = format(y);
  }
  for (const x of ticks(window_[0], window_[1], false, w / 90)) {
    const text = make("text", { x: sx(x), y: h - 7, "text-anchor": sx(x) > w - 24 ? "end" : "middle" }, svg);
    text.textContent = format(x) + (state.x === "hours" ? " h" : "");
  }
  const clip = `clip-${spec.name}`, inside = make("g", { "clip-path": `url(#${clip})` }, svg);
  make("rect", { x: box.l, y: 0, width: w - box.l - box.r + 4, height: h - box.b + 2 }, make("clipPath", { id: clip }, svg));
  for (const v of spec.levels) {
    if (v.run !== null && state.hidden.has(v.run)) continue;
    const colour = v.run === null || about.names.length === 1 ? "var(--soft)" : `var(--c${v.run % 8})`;
    make("line", { x1: box.l, x2: w, y1: sy(v.y), y2: sy(v.y), style: `stroke:${colour};stroke-dasharray:3 3` }, inside);
    make("text", { x: w - box.r - 4, y: sy(v.y) - 5, "text-anchor": "end" }, inside).textContent =
      v.run === null || about.names.length === 1 ? v.label : `${about.names[v.run]}: ${v.label}`;
  }
  for (const l of lines) {
    if (l.raw) make("path", { d: path(l.xs, l.raw, sx, sy), style: `fill:none;stroke:${l.colour};stroke-width:1`, opacity: 0.25 }, inside);
    stroke(make("path", { d: path(l.xs, l.ys, sx, sy) }, inside), l, l.colour);
    const marked = MARKED.has(l.kind) && l.xs.length <= 60, gap = i => (l.ys[i] ?? null) === null;
    l.xs.forEach((x, i) => !gap(i) && (marked || gap(i - 1) && gap(i + 1)) && point(l.kind, sx(x), sy(l.ys[i]), 2.8, l.colour, inside));
  }
  for (const m of spec.marks) {
    if (state.hidden.has(m.run)) continue;
    const x = sx(at(m.run, m.x));
    if (m.line) {
      make("line", { x1: x, x2: x, y1: box.t, y2: h - box.b, style: "stroke:var(--c4);stroke-dasharray:4 3" }, inside);
      const right = x < w / 2, words = make("text", { x: x + (right ? 5 : -5), y: box.t + 10, "text-anchor": right ? "start" : "end" }, inside);
      words.textContent = about.names.length > 1 ? `${about.names[m.run]}: ${m.label}` : m.label;
      continue;
    }
    const mark = make("path", { d: `M${x - 4} ${h - box.b}h8l-4 -7z`, style: "fill:var(--c4)" }, inside);
    make("title", {}, mark).textContent = `iteration ${m.x}: ${m.label}`;
  }
  listen(figure, svg, { lines, sx, sy, w, h, box, window_, spec });
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid; else high = mid; }
  return Math.abs(xs[low] - x) < Math.abs(xs[high] - x) ? low : high;
}

function listen(figure, svg, c) {
  const over = make("g", { "pointer-events": "none" }, svg);
  let from = null;
  const xOf = e => {
    const b = svg.getBoundingClientRect(), px = (e.clientX - b.left) * c.w / b.width;
    return c.window_[0] + Math.min(Math.max((px - c.box.l) / (c.w - c.box.l - c.box.r), 0), 1) * (c.window_[1] - c.window_[0]);
  };
  svg.onpointerdown = e => { if (e.pointerType === "mouse" && e.button === 0) { from = xOf(e); svg.setPointerCapture(e.pointerId); } };
  svg.onpointerup = e => {
    const to = xOf(e), ends = from === null ? null : [Math.min(from, to), Math.max(from, to)];
    from = null;
    if (ends && c.sx(ends[1]) - c.sx(ends[0]) > 8) { state.zoom = ends; tip.hidden = true; drawAll(); }
  };
  svg.ondblclick = () => { state.zoom = null; drawAll(); };
  svg.onpointerleave = () => { over.replaceChildren(); tip.hidden = true; };
  svg.onpointermove = e => {
    const x = xOf(e);
    over.replaceChildren();
    if (from !== null) make("rect", { x: c.sx(Math.min(from, x)), y: 0, width: Math.abs(c.sx(x) - c.sx(from)), height: c.h - c.box.b, style: "fill:var(--soft)", opacity: 0.2 }, over);
    make("line", { x1: c.sx(x), x2: c.sx(x), y1: c.box.t, y2: c.h - c.box.b, style: "stroke:var(--soft)", opacity: 0.6 }, over);
    tip.replaceChildren();
    const words = document.createElement("b");
    words.textContent = state.x === "iteration" ? `iteration ${Math.round(x).toLocaleString("en")}` : state.x === "hours" ? `${format(x)} h` : `${Math.round(x).toLocaleString("en")} tokens`;
    tip.append(words);
    for (const l of c.lines) {
      const i = nearest(l.xs, x), beyond = c.sx(x) - c.sx(l.xs[l.xs.length - 1]);
      if (beyond > 12) continue;  // this run has ended before
      if (l.ys[i] === null || l.xs[i] < c.window_[0] || l.xs[i] > c.window_[1]) continue;
      make("circle", { cx: c.sx(l.xs[i]), cy: c.sy(l.ys[i]), r: 3.5, style: `fill:${l.colour}` }, over);
      const row = document.createElement("div"), dot = document.createElement("i"), name = document.createElement("span"), value = document.createElement("b");
      dot.className = "dot"; dot.style.setProperty("--c", l.colour);
      name.textContent = about.names.length > 1 ? `${about.names[l.run]}${c.lines.some(o => o.run === l.run && o !== l) ? ", " + l.label : ""}` : l.label;
      value.textContent = exact(l.ys[i]);
      row.append(dot, name, value);
      tip.append(row);
    }
    tip.hidden = false;
    const left = e.pageX + 16 + tip.offsetWidth > document.body.clientWidth ? e.pageX - tip.offsetWidth - 16 : e.pageX + 16;
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${e.pageY + 14}px`;
  };
}

function drawAll() {
  const focused = document.activeElement?.closest(".chart")?.id;  // drawing replaces the button that has the focus
  document.querySelectorAll(".chart").forEach(draw);
  if (focused) document.querySelector(`#${focused} .top button`).focus();
  document.querySelectorAll(".wide").forEach(each => each.scrollWidth > each.clientWidth ? each.tabIndex = 0 : each.removeAttribute("tabindex"));
  const whole = document.getElementById("whole");
  if (whole) whole.hidden = !state.zoom;
  document.querySelectorAll(".card").forEach(card => card.setAttribute("aria-pressed", !state.hidden.has(+card.dataset.run)));
}

// Read the data of the page, and set its controls to the current state.
function begin() {
  const data = document.getElementById("about");
  about = data ? JSON.parse(data.textContent) : { names: [], axes: [] };
  document.querySelectorAll(".card").forEach(card => card.onclick = () => {
    const run = +card.dataset.run;
    if (about.names.length > 1 && !state.hidden.delete(run)) state.hidden.add(run);
    drawAll();
  });
  document.querySelectorAll("input[name=x]").forEach(input => {
    input.checked = input.value === state.x;
    input.onchange = () => { state.x = input.value; state.zoom = null; drawAll(); };
  });
  const smooth = document.getElementById("smooth");
  smooth.value = state.smooth;
  smooth.oninput = () => { state.smooth = +smooth.value; drawAll(); };
  document.getElementById("whole").onclick = () => { state.zoom = null; smooth.focus(); drawAll(); };
  document.getElementById("theme").onclick = () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    theme(dark ? "light" : "dark");
  };
  drawAll();
}

function theme(name) {
  root.dataset.theme = name;
  try { localStorage.setItem("theme", name); } catch { /* a page from a file may have no storage */ }
}

try { const kept = localStorage.getItem("theme"); if (kept) root.dataset.theme = kept; } catch { /* no storage */ }
let last = 0;
new ResizeObserver(() => { if (page.clientWidth !== last) { last = page.clientWidth; drawAll(); } }).observe(page);
begin();
