"use strict";
// Draws the page from the JSON in #data. State that a reader chooses is in the address: #quantity=weight_rms&scale=log
(() => {
  const page = document.getElementById("page");
  window.addEventListener("error", (event) => page.append(element("p", { class: "error", id: "error" }, `The page could not be drawn: ${event.message}`)));
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const LOG = new Set(["condition_number", "momentum_norm", "update_ratio", "effective_lr"]);
  const RULE_LABELS = { ...data.quantities, update_ratio_max: "largest relative step of a layer", failures: "failed refreshes so far" };
  const dark = matchMedia("(prefers-color-scheme: dark)");

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  function shape(name, attributes = {}, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }
  function format(x) {
    if (x === null || x === undefined) return "–";
    const size = Math.abs(x);
    if (Number.isInteger(x) && size < 1e6) return String(x);
    if (size >= 1e5 || (size < 1e-4 && size > 0)) return x.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
    return String(Number(x.toPrecision(4)));
  }
  const plural = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

  // ---------------------------------------------------------------- hints under the pointer
  const tip = element("div", { class: "tip", hidden: "" });
  document.body.append(tip);
  function showTip(event, lines) {
    tip.replaceChildren(...lines.map((line) => element("div", {}, line)));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - box.width - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - box.height - 8)}px`;
  }
  const hideTip = () => { tip.hidden = true; };

  // ---------------------------------------------------------------- scales
  function ticks(low, high, log) {
    if (log) {
      const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
      const by = Math.max(1, Math.ceil((last - first + 1) / 6)), found = [];
      for (let e = first; e <= last; e += by) found.push(10 ** e);
      if (found.length > 2) return found;
      const finer = [];
      for (let e = first - 1; e <= last + 1; e += 1) for (const m of [1, 2, 5]) if (m * 10 ** e >= low && m * 10 ** e <= high) finer.push(Number((m * 10 ** e).toPrecision(3)));
      if (finer.length > 1) return finer;
    }
    const raw = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= raw);
    const found = [];
    for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-6; t += step) found.push(Number(t.toPrecision(12)));
    return found;
  }
  function extent(values, log) {
    let low = Infinity, high = -Infinity;
    for (const v of values) if (v !== null && (!log || v > 0)) { low = Math.min(low, v); high = Math.max(high, v); }
    if (low === Infinity) return null;
    if (low === high) return log ? [low / 2, high * 2] : [low - Math.max(Math.abs(low) * 0.05, 1e-9), high + Math.max(Math.abs(high) * 0.05, 1e-9)];
    if (log) return [low / 1.15, high * 1.15];
    const pad = (high - low) * 0.05;
    return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
  }

  // ---------------------------------------------------------------- line charts
  function lineChart({ title, unit, series, scale, key }) {
    const W = 540, H = 250, left = 58, right = 14, top = 10, bottom = 30;
    const points = series.flatMap((s) => s.points);
    const log = scale === "log" && points.some(([, y]) => y > 0);
    const ys = extent(points.map(([, y]) => y), log), xs = [Math.min(...points.map(([x]) => x)), Math.max(...points.map(([x]) => x))];
    const X = (x) => left + (xs[1] === xs[0] ? 0.5 : (x - xs[0]) / (xs[1] - xs[0])) * (W - left - right);
    const t = log ? Math.log10 : (v) => v;
    const Y = (y) => H - bottom - ((t(y) - t(ys[0])) / (t(ys[1]) - t(ys[0]))) * (H - top - bottom);
    const svg = shape("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
    const axis = shape("g", { class: "axis" });
    for (const y of ticks(ys[0], ys[1], log)) {
      axis.append(shape("line", { x1: left, x2: W - right, y1: Y(y), y2: Y(y) }), shape("text", { x: left - 8, y: Y(y) + 4, "text-anchor": "end" }, format(y)));
    }
    for (const x of xs[1] > xs[0] ? ticks(xs[0], xs[1], false).filter(Number.isInteger) : [xs[0]]) {
      axis.append(shape("text", { x: X(x), y: H - bottom + 18, "text-anchor": "middle" }, format(x)));
    }
    axis.append(shape("line", { class: "base", x1: left, x2: W - right, y1: H - bottom, y2: H - bottom }));
    svg.append(axis);
    series.forEach((s, i) => {
      const shown = s.points.filter(([, y]) => !log || y > 0);
      if (!shown.length) return;
      svg.append(shape("path", { class: "series", d: "M" + shown.map(([x, y]) => `${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join("L"), fill: "none", stroke: `var(--s${i % 6})`, "stroke-width": 2, "stroke-linejoin": "round", "stroke-linecap": "round" }));
      if (shown.length < 25) for (const [x, y] of shown) svg.append(shape("circle", { cx: X(x), cy: Y(y), r: shown.length === 1 ? 4 : 2.6, fill: `var(--s${i % 6})` }));
    });
    const cross = shape("line", { class: "cross", y1: top, y2: H - bottom, visibility: "hidden" });
    svg.append(cross);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = xs[0] + (((event.clientX - box.left) / box.width) * W - left) / (W - left - right) * (xs[1] - xs[0]);
      const nearest = points.reduce((best, [x]) => (Math.abs(x - at) < Math.abs(best - at) ? x : best), points[0][0]);
      cross.setAttribute("x1", X(nearest)); cross.setAttribute("x2", X(nearest)); cross.setAttribute("visibility", "visible");
      const here = series.map((s) => [s.name, s.points.find(([x]) => x === nearest)]).filter(([, p]) => p);
      showTip(event, [`step ${nearest}`, ...here.map(([name, p]) => `${name}: ${format(p[1])}`)]);
    });
    svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hideTip(); });
    const legend = element("div", { class: "legend" });
    if (series.length > 1 || series[0].name.includes(", ")) series.forEach((s, i) => legend.append(element("span", { class: "key" }, element("i", { style: `background:var(--s${i % 6})` }), s.name)));
    const note = [unit, log ? "logarithmic" : ""].filter(Boolean).join(", ");
    const head = element("div", { class: "head" }, element("h3", {}, title[0].toUpperCase() + title.slice(1)), element("span", { class: "soft small" }, note), legend);
    return element("figure", { "data-chart": key || title }, head, svg);
  }

  // ---------------------------------------------------------------- heat map
  // One hue from light to dark, and the other way round on a dark page: more is further from the page.
  const RAMP = [[225, 238, 252], [168, 205, 245], [104, 165, 232], [54, 121, 205], [27, 80, 158], [12, 43, 98]];
  const NIGHT = [[28, 42, 62], [30, 66, 112], [38, 98, 170], [74, 140, 218], [133, 185, 245], [214, 233, 255]];
  function colour(f) {
    const ramp = dark.matches ? NIGHT : RAMP, at = Math.max(0, Math.min(1, f)) * (ramp.length - 1), i = Math.min(ramp.length - 2, Math.floor(at));
    return `rgb(${ramp[i].map((c, k) => Math.round(c + (ramp[i + 1][k] - c) * (at - i))).join(",")})`;
  }
  function shortNames(names) {
    const parts = names.map((n) => n.replace(/\.(weight|default\.weight)$/, "").split("."));
    let drop = 0;
    while (parts.length > 1 && parts.every((p) => p.length > drop + 1 && p[drop] === parts[0][drop])) drop += 1;
    const matrixParts = ["self_attn", "mlp", "attn"];
    return parts.map((p) => p.slice(drop).filter((w, i, all) => i === all.length - 1 || !matrixParts.includes(w)).join("."));
  }
  function choices() { return new URLSearchParams(location.hash.slice(1)); }
  function choose(key, value) {
    const now = choices();
    now.set(key, value);
    history.replaceState(null, "", `#${now}`);
    drawHeat();
  }
  const heatSection = element("section", { id: "heat" });
  function drawHeat() {
    const known = Object.keys(data.heat.quantities), now = choices();
    heatSection.replaceChildren(element("h2", {}, "Layers over steps"));
    if (!known.length) {
      heatSection.append(element("p", { class: "soft", id: "no-layers" }, "This log has figures by rule only. Train with EmoptCallback(\"layers\") or EMOPT_DIAGNOSTICS=layers to see every layer."));
      return;
    }
    const quantity = known.includes(now.get("quantity")) ? now.get("quantity") : known.includes("update_ratio") ? "update_ratio" : known[0];
    const scale = ["log", "linear"].includes(now.get("scale")) ? now.get("scale") : LOG.has(quantity) ? "log" : "linear";
    const filter = now.get("filter") || "";
    const all = data.heat.quantities[quantity], names = shortNames(all.layers);
    const chosen = all.layers.map((_, i) => i).filter((i) => all.layers[i].includes(filter));
    const pick = element("select", { "aria-label": "quantity" }, ...known.map((q) => element("option", { value: q, ...(q === quantity ? { selected: "" } : {}) }, data.quantities[q])));
    pick.addEventListener("change", () => choose("quantity", pick.value));
    const way = element("select", { "aria-label": "scale" }, ...["linear", "log"].map((s) => element("option", { value: s, ...(s === scale ? { selected: "" } : {}) }, s === "log" ? "logarithmic" : "linear")));
    way.addEventListener("change", () => choose("scale", way.value));
    const search = element("input", { type: "search", placeholder: "layers that contain …", value: filter, "aria-label": "filter" });
    search.addEventListener("change", () => choose("filter", search.value));
    const values = chosen.flatMap((i) => all.rows[i]).filter((v) => v !== null && (scale === "linear" || v > 0));
    let low = Infinity, high = -Infinity;
    for (const v of values) { low = Math.min(low, v); high = Math.max(high, v); }
    const bar = element("span", { class: "scale" });
    heatSection.append(element("div", { class: "controls" }, pick, way, search, bar));
    if (!values.length) {
      heatSection.append(element("p", { class: "soft" }, filter ? `No layer's name contains “${filter}”.` : "All values are 0; choose the linear scale."));
      return;
    }
    const stops = Array.from({ length: 9 }, (_, i) => colour(low === high ? 0.5 : i / 8)).join(",");
    bar.append(format(low), element("i", { style: `background:linear-gradient(90deg,${stops})` }), format(high));
    const t = scale === "log" ? Math.log10 : (v) => v;
    const fraction = (v) => (high === low ? 0.5 : (t(v) - t(low)) / (t(high) - t(low)));
    const rowHeight = chosen.length > 60 ? 10 : chosen.length > 30 ? 14 : 18, columns = data.heat.steps.length;
    const canvas = element("canvas", { role: "img", "aria-label": data.quantities[quantity] });
    const ratio = Math.max(1, devicePixelRatio || 1), width = 900;
    canvas.width = width * ratio; canvas.height = chosen.length * rowHeight * ratio;
    canvas.style.height = `${chosen.length * rowHeight}px`;
    const pen = canvas.getContext("2d"), cell = canvas.width / columns;
    const empty = getComputedStyle(document.documentElement).getPropertyValue("--empty");
    const gap = rowHeight > 10 ? ratio : 0;
    let cells = 0;
    chosen.forEach((i, row) => all.rows[i].forEach((v, c) => {
      const there = v !== null && (scale === "linear" || v > 0);
      cells += there ? 1 : 0;
      pen.fillStyle = there ? colour(fraction(v)) : empty;
      const from = Math.round(c * cell), to = Math.round((c + 1) * cell);
      pen.fillRect(from, row * rowHeight * ratio, to - from - (cell > 8 * ratio ? gap : 0), rowHeight * ratio - gap);
    }));
    canvas.dataset.cells = cells; canvas.dataset.quantity = quantity; canvas.dataset.layers = chosen.length;
    const list = element("div", { class: "names" });
    chosen.forEach((i) => {
      const line = element("div", { title: all.layers[i], style: `height:${rowHeight}px;line-height:${rowHeight}px${rowHeight < 14 ? ";font-size:9px" : ""}` }, names[i]);
      list.append(line);
    });
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const c = Math.min(columns - 1, Math.floor(((event.clientX - box.left) / box.width) * columns));
      const row = Math.min(chosen.length - 1, Math.floor(((event.clientY - box.top) / box.height) * chosen.length));
      showTip(event, [all.layers[chosen[row]], `step ${data.heat.steps[c]}: ${format(all.rows[chosen[row]][c])}`]);
    });
    canvas.addEventListener("pointerleave", hideTip);
    const shownSteps = columns > 1 ? [0, 0.25, 0.5, 0.75, 1].map((f) => data.heat.steps[Math.round(f * (columns - 1))]) : data.heat.steps;
    const marks = [...new Set(shownSteps)].map((s, i) => element("span", {}, i ? String(s) : `step ${s}`));
    heatSection.append(element("div", { class: "heat" }, list, canvas, element("div", { class: "ticks" }, ...marks)));
    if (data.heat.stride > 1) heatSection.append(element("p", { class: "soft small" }, `Of ${data.heat.stride} logged steps one is shown.`));
  }

  // ---------------------------------------------------------------- the page
  const last = (points) => (points && points.length ? points[points.length - 1][1] : null);
  function tile(label, value, bad) {
    return element("div", { class: bad ? "tile bad" : "tile" }, element("b", {}, value), element("span", { class: "soft small" }, label));
  }
  function header() {
    const find = (title, name) => last(((data.charts.find((c) => c.title === title) || { series: [] }).series.find((s) => s.name === name) || {}).points);
    const skipped = data.events.filter((e) => e.text.startsWith("step skipped")).reduce((n, e) => n + e.count, 0);
    const failed = data.events.filter((e) => e.text.startsWith("refresh")).reduce((n, e) => n + e.count, 0);
    const tiles = element("div", { class: "tiles" }, tile("steps", String(data.steps[1])));
    for (const [label, value] of [["last training loss", find("Loss", "train")], ["last held-out loss", find("Loss", "held-out")]]) if (value !== null) tiles.append(tile(label, format(value)));
    tiles.append(tile("skipped steps", String(skipped), skipped > 0), tile("failed refreshes", String(failed), failed > 0));
    const rules = Object.keys(data.rules).join(", ");
    page.append(element("header", {}, element("h1", {}, data.run), element("p", { class: "soft" }, `${rules ? `Rules: ${rules}. ` : ""}${plural(data.logs, "log entry").replace("entrys", "entries")}, steps ${data.steps[0]} to ${data.steps[1]}.`), tiles));
  }
  function events() {
    const section = element("section", { id: "events" }, element("h2", {}, "Skipped steps and failures"));
    if (!data.events.length) section.append(element("p", { class: "fine" }, "None: no step was skipped, no refresh failed, every loss is a number."));
    else section.append(element("ul", { class: "events" }, ...data.events.map((e) => element("li", {}, element("b", {}, `step ${e.step}`), ` ${e.count} × ${e.text}`, e.step - e.after > 1 && !e.text.includes(" is ") ? element("span", { class: "soft" }, ` (after step ${e.after})`) : ""))));
    page.append(section);
  }
  function rules() {
    const names = Object.keys(data.rules);
    if (!names.length) return;
    const grid = element("div", { class: "grid" });
    for (const quantity of Object.keys(RULE_LABELS)) {
      const series = names.map((name) => ({ name, points: data.rules[name][quantity] || [] })).filter((s) => s.points.length);
      if (!series.length || (quantity === "failures" && !series.some((s) => last(s.points)))) continue;
      grid.append(lineChart({ title: RULE_LABELS[quantity], series, scale: LOG.has(quantity) || quantity === "update_ratio_max" ? "log" : "linear", key: quantity, unit: series.length === 1 ? series[0].name : "" }));
    }
    page.append(element("section", { id: "rules" }, element("h2", {}, "By rule"), grid));
  }
  function numbers() {
    const names = Object.keys(data.rules), columns = Object.keys(RULE_LABELS).filter((q) => names.some((n) => data.rules[n][q]));
    if (!names.length) return;
    const head = element("tr", {}, element("th", {}, "rule"), ...columns.map((q) => element("th", {}, q.replaceAll("_", " "))));
    const rows = names.map((n) => element("tr", {}, element("td", {}, n), ...columns.map((q) => element("td", {}, format(last(data.rules[n][q]))))));
    page.append(element("section", { id: "numbers" }, element("h2", {}, "Last values"), element("div", { class: "scroll" }, element("table", {}, head, ...rows))));
  }

  header();
  events();
  page.append(element("section", { id: "charts" }, element("h2", {}, "Training"), element("div", { class: "grid" }, ...data.charts.map(lineChart))));
  page.append(heatSection);
  drawHeat();
  rules();
  numbers();
  page.append(element("footer", {}, `From ${data.source}, by hf_emopt ${data.version}.`));
  addEventListener("hashchange", drawHeat);
  dark.addEventListener("change", drawHeat);
  document.body.dataset.drawn = "true";
})();
