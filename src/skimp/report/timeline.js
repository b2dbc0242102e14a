// The memory timeline of a plan: hover for a moment, drag to look closer, click a category to leave it out.
// Reads the JSON beside it; draws into its own element; asks nobody else for anything.
(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("timeline-data").textContent);
  const root = document.getElementById("timeline");
  const NS = "http://www.w3.org/2000/svg";
  const W = 1000, H = 420, L = 60, R = 985, T = 26, B = 380;
  const n = data.seconds.length;
  const hidden = new Set();
  let from = 0, to = data.end;

  const el = (name, attributes, parent, text) => {
    const e = name.startsWith("html:") ? document.createElement(name.slice(5)) : document.createElementNS(NS, name);
    for (const k in attributes) e.setAttribute(k, attributes[k]);
    if (text !== undefined) e.textContent = text;
    if (parent) parent.appendChild(e);
    return e;
  };
  const size = (b) => {
    for (const [u, f] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
      if (b >= 0.9995 * f) { const v = b / f; return v.toFixed(v >= 99.95 ? 0 : v >= 9.995 ? 1 : 2) + " " + u; }
    return Math.round(b) + " B";
  };
  const time = (s) => (s >= 1 ? s.toFixed(2) + " s" : (1000 * s).toFixed(2) + " ms");
  const shown = () => data.layers.filter((l) => !hidden.has(l.name));
  const total = (i) => shown().reduce((sum, l) => sum + l.bytes[i], 0);
  const where = (i) => [data.phases[i], data.owners[i], data.names[i]].filter(Boolean).join(", ") || "before the first operator";

  const svg = el("svg", { viewBox: `0 0 ${W} ${H}`, class: "live", role: "img", "aria-label": data.title, tabindex: "0" }, root);
  const readout = el("html:div", { class: "readout", "aria-live": "polite" }, root);
  const legend = el("html:div", { class: "legend" }, root);

  const x = (s) => L + ((s - from) / (to - from || 1)) * (R - L);
  const inside = () => {
    const kept = [];
    for (let i = 0; i < n; i++) {
      const end = i + 1 < n ? data.seconds[i + 1] : data.end;
      if (end >= from && data.seconds[i] <= to) kept.push(i);
    }
    return kept;
  };

  function draw() {
    svg.replaceChildren();
    const kept = inside();
    let top = 0;
    for (const i of kept) top = Math.max(top, total(i));
    const levels = data.levels.filter((l) => l.bytes <= 1.6 * top);
    if (!hidden.size) {
      for (const l of levels) top = Math.max(top, l.bytes);
      if (data.resident) for (const i of kept) top = Math.max(top, data.resident[i]);
    }
    top = 1.06 * top || 1;
    const y = (b) => B - (b / top) * (B - T);
    const step = [1, 2, 5, 10].map((m) => m * 10 ** Math.floor(Math.log10(top / 5))).find((s) => top / s <= 7) || top;
    for (let v = 0; v <= top; v += step) {
      el("line", { x1: L, x2: R, y1: y(v), y2: y(v), class: "grid" }, svg);
      el("text", { x: L - 6, y: y(v) + 4, "text-anchor": "end", class: "axis" }, svg, v ? size(v) : "0");
    }
    for (let k = 0; k <= 6; k++) {
      const s = from + (k / 6) * (to - from);
      el("text", { x: x(s), y: B + 18, "text-anchor": k ? (k === 6 ? "end" : "middle") : "start", class: "axis" }, svg, time(s));
    }
    let lower = kept.map(() => 0);
    for (const layer of shown()) {
      const upper = kept.map((i, j) => lower[j] + layer.bytes[i]);
      let path = "";
      kept.forEach((i, j) => {
        const a = x(Math.max(from, data.seconds[i]));
        path += (j ? "H" + a + "V" : "M" + a + ",") + y(upper[j]);
      });
      path += "H" + R;
      for (let j = kept.length - 1; j >= 0; j--)
        path += "V" + y(lower[j]) + "H" + x(Math.max(from, data.seconds[kept[j]]));
      el("path", { d: path + "Z", class: "layer c-" + layer.name }, svg);
      lower = upper;
    }
    if (data.resident && !hidden.size) {
      const points = kept.map((i) => `${x(Math.max(from, data.seconds[i]))},${y(data.resident[i])}`);
      el("polyline", { points: points.join(" "), class: "resident-line" }, svg);
    }
    for (const [name, begin, end] of data.segments) {
      if (end < from || begin > to) continue;
      const at = x(Math.max(from, begin));
      if (begin > from) el("line", { x1: at, x2: at, y1: T, y2: B, class: "cut" }, svg);
      if (x(Math.min(to, end)) - at > 6.4 * name.length) el("text", { x: at + 3, y: T - 8, class: "strip-name" }, svg, name);
    }
    // Names of narrow phases would lie on each other: the later of two that touch goes.
    let right = -1;
    for (const t of svg.querySelectorAll(".strip-name")) {
      const left = +t.getAttribute("x");
      if (left < right) t.remove(); else right = left + 6.4 * t.textContent.length + 8;
    }
    if (!hidden.size) {
      let below = T - 14; // names keep 14 apart, from the highest line down
      for (const l of [...levels].sort((a, b) => b.bytes - a.bytes)) {
        el("line", { x1: L, x2: R, y1: y(l.bytes), y2: y(l.bytes), class: "level " + l.kind }, svg);
        below = Math.max(below + 14, y(l.bytes) - 5);
        el("text", { x: R - 4, y: below, "text-anchor": "end", class: "level-name" }, svg, l.words + " " + size(l.bytes));
      }
    }
    const peak = kept.reduce((best, i) => (total(i) > total(best) ? i : best), kept[0]);
    el("circle", { cx: x(Math.max(from, data.seconds[peak])), cy: y(total(peak)), r: 5, class: "peak" }, svg);
    svg.cross = el("line", { x1: -9, x2: -9, y1: T, y2: B, class: "cross" }, svg);
    svg.band = el("rect", { x: 0, y: T, width: 0, height: B - T, class: "band" }, svg);
    tell(peak, "fullest: ");
  }

  function tell(i, before) {
    readout.replaceChildren();
    el("html:b", {}, readout, (before || "") + size(total(i)));
    el("html:span", {}, readout, ` at ${time(data.seconds[i])} · ${where(i)} · operator ${data.operators[i].toLocaleString("en")}`);
    const list = el("html:div", { class: "shares" }, readout);
    for (const l of [...shown()].reverse())
      if (l.bytes[i]) {
        const one = el("html:span", {}, list);
        el("html:i", { class: "chip c-" + l.name }, one);
        one.append(`${l.name} ${size(l.bytes[i])}`);
      }
    if (data.resident) el("html:span", {}, list, `whole process, by the system ${size(data.resident[i])}`);
    svg.at = i;
    svg.cross.setAttribute("x1", x(Math.max(from, data.seconds[i])));
    svg.cross.setAttribute("x2", x(Math.max(from, data.seconds[i])));
  }
  const second = (event) => {
    const box = svg.getBoundingClientRect();
    const px = ((event.clientX - box.left) / box.width) * W;
    return from + Math.min(1, Math.max(0, (px - L) / (R - L))) * (to - from);
  };
  const point = (s) => {
    let low = 0, high = n - 1;
    while (low < high) { const mid = (low + high + 1) >> 1; if (data.seconds[mid] <= s) low = mid; else high = mid - 1; }
    return low;
  };
  let begun = null;
  svg.addEventListener("pointerdown", (e) => { begun = second(e); svg.setPointerCapture(e.pointerId); });
  svg.addEventListener("pointermove", (e) => {
    const s = second(e);
    tell(point(s));
    if (begun !== null) {
      svg.band.setAttribute("x", x(Math.min(begun, s)));
      svg.band.setAttribute("width", Math.abs(x(s) - x(begun)));
    }
  });
  svg.addEventListener("pointerup", (e) => {
    const s = second(e), a = Math.min(begun, s), b = Math.max(begun, s);
    begun = null;
    if (b - a > 0.01 * (to - from)) { from = a; to = b; }
    draw();
  });
  svg.addEventListener("dblclick", () => { from = 0; to = data.end; draw(); });
  svg.addEventListener("keydown", (e) => {
    if (e.key === "ArrowRight") tell(Math.min(n - 1, svg.at + 1));
    else if (e.key === "ArrowLeft") tell(Math.max(0, svg.at - 1));
    else if (e.key === "Escape") { from = 0; to = data.end; draw(); }
    else return;
    e.preventDefault();
  });
  for (const l of [...data.layers].reverse()) {
    const b = el("html:button", { type: "button", "aria-pressed": "true" }, legend);
    el("html:i", { class: "chip c-" + l.name }, b);
    b.append(l.name);
    b.addEventListener("click", () => {
      if (hidden.has(l.name)) hidden.delete(l.name); else if (hidden.size + 1 < data.layers.length) hidden.add(l.name);
      b.setAttribute("aria-pressed", String(!hidden.has(l.name)));
      draw();
    });
  }
  el("html:small", {}, legend, "drag to look closer, double-click or Escape for all of it, arrow keys move, click a name to leave it out");
  draw();
})();
