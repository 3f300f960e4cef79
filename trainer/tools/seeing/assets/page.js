"use strict";
// The page of runs. All text comes in as text nodes; nothing is made of strings of HTML.
(() => {
const DATA = JSON.parse(document.getElementById("data").textContent);
const LIVE = DATA.live, RUNS = DATA.runs, MANY = RUNS.length > 1;
const COLORS = ["#2f6fd6", "#c2570c", "#1a8a4a", "#9050c0", "#b08000", "#008b9a", "#c0407a", "#6b7280"];
const MOST = 8000;
// [title, unit, what it is, keys, options]
const PANELS = [
  ["Loss", "nats", "of training and validation", ["loss", "validation_loss"], { log: true, smooth: "loss" }],
  ["Learning rate", "", "", ["lr"], {}],
  ["Gradient norm", "", "before clipping; dashed: where it is clipped", ["grad_norm"], { smooth: "grad_norm", clip: true }],
  ["Step time", "s", "median, 90 %, slowest of each log interval", ["step_seconds_p50", "step_seconds_p90", "step_seconds_max"], {}],
  ["Speed", "tokens/s", "over all ranks", ["tokens_per_second"], { zero: true }],
  ["MFU", "%", "share of the peak of the GPUs", ["mfu"], { scale: 100, zero: true }],
  ["Waiting for data", "%", "share of the time", ["data_wait"], { scale: 100, zero: true }],
  ["Memory of rank 0", "GB", "highest since it started", ["peak_memory"], { scale: 1e-9 }],
  ["Checkpoints", "s", "from the request to the commit; what of it held up training", ["checkpoint_seconds", "checkpoint_stall"], { dots: true, zero: true }],
  ["Ranks", "", "that trained", ["ranks"], { zero: true, stepped: true }],
];
const NOT_DRAWN = new Set(["tokens", "eta_seconds", "tokens_per_second_per_rank", "checkpoint_step",
  "checkpoint_bytes", "checkpoint_writers", "checkpoint_failed"]);
const KNOWN = new Set(PANELS.flatMap(panel => panel[3]));
const NAMES = { loss: "training", validation_loss: "validation", step_seconds_p50: "median",
  step_seconds_p90: "90 %", step_seconds_max: "slowest", checkpoint_seconds: "written in",
  checkpoint_stall: "stood still" };
const PARTS = { steps: "steps that count", lost: "steps done again", starting: "starting",
  recovery: "failure to restart", down: "not running (not to scale)" };

const view = { axis: "step", log: true, smooth: 0, zoom: null, all: false, tables: new Set() };
let plots = [], detail = null, asked = 0;
let overdue = false;  // something new is not drawn yet, because a control has the focus

// --- elements ---------------------------------------------------------------------------------

function el(name, given = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(given)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  for (const one of inside.flat(Infinity)) if (one != null && one !== "") made.append(one);
  return made;
}

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = place => COLORS[place % COLORS.length];
const plural = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;

function number(value) {
  if (value == null || !isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: 5 });
}

function clock(seconds) {
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600);
  const two = value => String(value).padStart(2, "0");
  const rest = `${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
  return hours ? `${hours}:${rest} h` : `${rest} min`;
}

function moment(time, withDate) {
  const at = new Date(time * 1000), two = value => String(value).padStart(2, "0");
  if (isNaN(at)) return "";
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const hour = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return withDate ? `${day} ${hour}` : hour;
}

const began = run => run.ribbon.length ? run.ribbon[0].parts[0][1] : run.now;
const ended = run => run.ribbon.length ? run.ribbon.at(-1).parts.at(-1)[2] : run.now;
const manyDays = run => moment(began(run), true).slice(0, 10) !== moment(ended(run), true).slice(0, 10);

// --- what it says at the top --------------------------------------------------------------------

const reading = run => run.state[0] === "reading";

function headline(run) {
  if (reading(run)) return el("p", { class: "headline" }, "Failures and the proof follow as soon as the ledger has been read.");
  const failures = run.events.filter(event => event.failed && event.ended);
  const count = +(run.card.find(row => row[0] === "failures") || [0, 0])[1];
  const lost = (run.card.find(row => row[0] === "steps lost") || [0, "0"])[1];
  const said = [];
  if (!count) said.push("No failure.");
  else {
    const kinds = new Map();
    for (const event of failures) kinds.set(event.kind, (kinds.get(event.kind) || 0) + 1);
    const words = { killed: "killed from outside", crashed: "crashed", memory: "out of memory", error: "ended by an error",
      storage: "refused by storage", hang: "hung", node: "machine gone", network: "connection lost",
      process: "launcher's process killed", silent: "everything killed at once", stopped: "stopped for good" };
    const list = [...kinds].sort((a, b) => b[1] - a[1]).map(([kind, n]) => `${n} × ${words[kind] || kind}`);
    said.push(`${plural(count, "failure")}: ${list.join(", ")}; ${lost === "0" ? "no step" : plural(+lost, "step")} lost.`);
  }
  return el("p", { class: "headline" }, said.join(" ") + " ",
    el("span", { class: run.proof.fine ? "good" : "bad" },
      run.proof.fine ? "Proved: " + run.proof.text + "." : "Not proved: " + run.proof.text));
}

function top(run) {
  const rows = run.card.map(([what, value, remark]) =>
    el("div", {}, el("dt", {}, what, remark && el("span", { class: "remark" }, remark)), el("dd", {}, value)));
  return [
    el("p", {}, el("span", { class: "state " + run.state[0] }, run.state[0]), " ",
      el("span", { class: "soft" }, run.state[1])),
    headline(run), el("dl", { class: "card" }, rows)];
}

// --- ribbon and events ---------------------------------------------------------------------------

function places(run) {
  // Unix time → share of the ribbon: all downtimes have the same width, however long they were.
  const spans = run.ribbon.flatMap(one => one.parts).filter(part => part[2] > part[1]);
  const up = spans.reduce((sum, part) => sum + (part[0] === "down" ? 0 : part[2] - part[1]), 0) || 1;
  const widths = spans.map(part => part[0] === "down" ? up * 0.02 : part[2] - part[1]);
  const total = widths.reduce((sum, width) => sum + width, 0) || 1;
  const marks = [];
  let at = 0;
  spans.forEach((part, n) => { marks.push([part[1], part[2], at / total, (at + widths[n]) / total]); at += widths[n]; });
  return time => {
    if (!marks.length) return 0;
    let low = 0, high = marks.length - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (marks[middle][0] <= time) low = middle; else high = middle - 1; }
    const [from, to, x0, x1] = marks[low];
    return x0 + (x1 - x0) * Math.min(1, Math.max(0, (time - from) / (to - from)));
  };
}

function ribbon(run) {
  const place = places(run), most = Math.max(...run.ribbon.map(one => one.ranks), 1);
  const box = el("div", { class: "ribbon", role: "img", "aria-label": `Wall time of ${run.name}: ${plural(run.attempts, "attempt")}; the list below says the same in words` });
  for (const one of run.ribbon) for (const [kind, from, to] of one.parts) {
    if (to <= from) continue;
    const bar = el("i", { class: kind, title: kind === "down" ? `not running for ${clock(to - from)}` :
      `attempt ${one.attempt}, ${plural(one.ranks, "rank")}: ${PARTS[kind]} for ${clock(to - from)}` });
    const left = place(from), right = place(to - 1e-6);
    bar.style.left = `${100 * left}%`;
    bar.style.width = `${100 * Math.max(0, right - left)}%`;
    bar.style.height = `${kind === "down" || kind === "recovery" ? 22 : 22 + 30 * one.ranks / most}px`;
    box.append(bar);
  }
  const failures = numbered(run);
  let before = -1;
  for (const [event, mark] of failures) {
    const x = place(event.time);
    const badge = el("b", { "aria-hidden": "true", title: event.text }, x - before < 0.012 ? "" : String(mark));
    if (x - before >= 0.012) before = x;
    else badge.style.visibility = "hidden";
    badge.style.left = `${100 * x}%`;
    box.append(badge);
  }
  const used = new Set(run.ribbon.flatMap(one => one.parts.map(part => part[0])));
  return [box,
    el("div", { class: "ends" }, el("span", {}, moment(began(run), true)),
      el("span", {}, `height: ranks (at most ${most})`), el("span", {}, moment(ended(run), true))),
    el("ul", { class: "legend" }, Object.entries(PARTS).filter(([kind]) => used.has(kind))
      .map(([kind, text]) => el("li", {}, el("i", { class: kind }), text)))];
}

function numbered(run) {
  const found = new Map();
  for (const event of run.events) if (event.failed && event.ended) found.set(event, found.size + 1);
  return found;
}

function eventList(run) {
  const marks = numbered(run), long = run.events.length > 14;
  let shown = run.events;
  if (long && !view.all) {
    const failed = shown.filter(event => event.failed).slice(-10);
    const rest = shown.filter(event => !event.failed).slice(-4);
    shown = shown.filter(event => failed.includes(event) || rest.includes(event));
  }
  const days = manyDays(run);
  const items = shown.map(event => {
    return el("li", { class: event.failed ? "failed" : "" },
      el("span", { class: "mark" }, marks.has(event) ? el("span", { "aria-label": `failure ${marks.get(event)}` }, String(marks.get(event))) : el("span", { "aria-hidden": "true" }, event.failed ? "!" : "·")),
      el("time", { class: "when", datetime: isFinite(event.time) ? new Date(event.time * 1000).toISOString() : "" }, moment(event.time, days)),
      el("span", { class: "step" }, `step ${event.step.toLocaleString("en")}`),
      el("div", { class: "what" }, el(event.ended || event.failed ? "strong" : "span", {}, event.text),
        event.cost && el("span", { class: "cost" }, ` · ${event.cost}`),
        event.evidence.length ? el("details", { "data-key": `${run.name} ${event.attempt} ${event.time}` }, el("summary", {}, "evidence"),
          el("dl", { class: "evidence" }, event.evidence.map(([what, text]) => [el("dt", {}, what), el("dd", {}, text)]))) : null));
  });
  const list = el("ol", { class: "events", "aria-label": `What happened in ${run.name}` }, items);
  if (!items.length) return [el("p", { class: "soft" }, "Nothing but steps so far.")];
  if (!long) return [list];
  return [list, el("button", { type: "button", onclick: () => { view.all = !view.all; render(); } },
    view.all ? "show fewer" : `show all ${run.events.length}`)];
}

function attemptTable(run) {
  const head = ["attempt", "began", "nodes", "ranks", "steps", "state from", "end"];
  const rows = run.ribbon.map(one => [one.attempt, moment(one.parts[0][1], true), one.nodes, one.ranks,
    one.to > one.from ? `${one.from + 1} to ${one.to}` : "none", one.source === "none" ? "fresh weights" : one.source, one.end]);
  return el("details", { "data-key": `${run.name} attempts` }, el("summary", {}, `Attempts (${run.attempts})`), table(head, rows));
}

function table(head, rows, tall = false) {
  return el("div", { class: tall ? "scroll tall" : "scroll", tabindex: "0", role: "region", "aria-label": "table" }, el("table", {},
    el("thead", {}, el("tr", {}, head.map(one => el("th", { scope: "col" }, String(one))))),
    el("tbody", {}, rows.map(row => el("tr", {}, row.map(one => el("td", { class: typeof one === "number" ? "number" : null },
      one instanceof Node ? one : typeof one === "number" ? number(one) : String(one))))))));
}

// --- curves ---------------------------------------------------------------------------------------

function along(run, steps) {
  if (view.axis === "step") return steps;
  const from = run.axis.step, to = run.axis[view.axis];
  if (!from.length || !to.length) return steps.map(() => null);
  let n = 0;
  return steps.map(step => {
    if (n && from[n] > step) n = 0;
    while (n < from.length - 1 && from[n + 1] <= step) n++;
    const more = n < from.length - 1 && from[n + 1] > from[n] ? (step - from[n]) / (from[n + 1] - from[n]) : 0;
    return to[n] + (n < from.length - 1 ? Math.max(0, more) * (to[n + 1] - to[n]) : 0);
  });
}

function rising(xs, ys) {
  // uPlot needs rising x: of several points with the same x, the last is drawn.
  const x = [], y = [];
  xs.forEach((one, n) => {
    if (one == null) return;
    if (x.length && one <= x.at(-1)) { if (one === x.at(-1)) y[y.length - 1] = ys[n]; return; }
    x.push(one); y.push(ys[n]);
  });
  return [x, y];
}

function smoothed(ys) {
  if (!view.smooth) return ys;
  let mean = null, weight = 0;
  return ys.map(y => { weight = view.smooth * weight + 1 - view.smooth; mean = view.smooth * (mean || 0) + (1 - view.smooth) * y; return mean / weight; });
}

function thinnedOut([x, y]) {
  if (x.length <= MOST) return [x, y];
  const size = Math.ceil(x.length / (MOST / 4)), kept = [];
  for (let n = 0; n < x.length; n += size) {
    let low = n, high = n;
    for (let k = n; k < Math.min(n + size, x.length); k++) { if (y[k] < y[low]) low = k; if (y[k] > y[high]) high = k; }
    kept.push(Math.min(low, high)); if (low !== high) kept.push(Math.max(low, high));
  }
  if (kept.at(-1) !== x.length - 1) kept.push(x.length - 1);
  return [kept.map(n => x[n]), kept.map(n => y[n])];
}

const titled = key => (key[0] || "").toUpperCase() + key.slice(1).replaceAll("_", " ");

function panelsNow() {
  const others = new Map();
  for (const run of RUNS) for (const key of Object.keys(run.curves))
    if (!KNOWN.has(key) && !NOT_DRAWN.has(key)) others.set(key, [titled(key), "", "", [key], {}]);
  if (![...RUNS].some(run => (run.curves.skipped_steps || [[], []])[1].some(value => value > 0))) others.delete("skipped_steps");
  return [...PANELS, ...others.values()];
}

function series(panel) {
  const [, , , keys, options] = panel, found = [];
  RUNS.forEach((run, place) => keys.forEach((key, n) => {
    const curves = detail && detail[place] && detail[place][key] ? detail[place] : run.curves;
    const curve = curves[key];
    if (!curve || !curve[0].length) return;
    let [x, y] = rising(along(run, curve[0]), curve[1]);
    if (options.scale) y = y.map(value => value * options.scale);
    const raw = y, smooth = options.smooth === key && view.smooth > 0;
    if (smooth) y = smoothed(y);
    const label = MANY ? `${run.name}${keys.length > 1 ? " " + (NAMES[key] || key) : ""}` : NAMES[key] || panel[0].toLowerCase();
    found.push({ label, x, y, raw: smooth ? raw : null, color: MANY ? color(place) : color(n), dash: MANY && n ? [4, 3] : null });
  }));
  return found;
}

function extent() {
  let high = 0, low = Infinity;
  RUNS.forEach(run => Object.entries(run.curves).forEach(([key, curve]) => {
    if (NOT_DRAWN.has(key) || !curve[0].length) return;
    for (const x of along(run, [curve[0][0], curve[0].at(-1)])) if (x != null) { high = Math.max(high, x); low = Math.min(low, x); }
  }));
  if (low === Infinity) return [0, 1];
  return low === high ? [low - 1, high + 1] : [Math.min(low, 0), high];
}

function lines(u) {
  // Draws events into each chart: failures in red with their number, changes in grey.
  const pen = u.ctx, ratio = devicePixelRatio || 1, { top, height, left, width } = u.bbox;
  pen.save();
  pen.font = `${11 * ratio}px system-ui`;
  pen.textAlign = "center";
  RUNS.forEach((run, place) => {
    const marks = numbered(run), faint = marks.size > 25 ? 0.3 : 0.85;
    let before = -Infinity;
    for (const event of run.events) {
      if (!event.ended || event.kind === "finished") continue;
      const [x] = along(run, [event.step]);
      const at = x == null ? NaN : u.valToPos(x, "x", true);
      if (!(at >= left && at <= left + width)) continue;
      pen.strokeStyle = pen.fillStyle = event.failed ? MANY ? color(place) : css("--bad") : css("--soft");
      pen.globalAlpha = event.failed ? faint : 0.35;
      pen.lineWidth = ratio;
      pen.setLineDash(event.failed ? [4 * ratio, 3 * ratio] : [1 * ratio, 4 * ratio]);
      pen.beginPath(); pen.moveTo(at, top); pen.lineTo(at, top + height); pen.stroke();
      const text = String(marks.get(event));
      if (event.failed && !MANY && at - before > (5 + 7 * text.length) * ratio) { pen.globalAlpha = 1; pen.fillText(text, at, top - 3 * ratio); before = at; }
    }
  });
  const clip = u.clipLine;
  if (clip != null) {
    const at = u.valToPos(clip, "y", true);
    if (at >= top && at <= top + height) { pen.globalAlpha = 0.8; pen.strokeStyle = css("--warn"); pen.setLineDash([6 * ratio, 4 * ratio]);
      pen.beginPath(); pen.moveTo(left, at); pen.lineTo(left + width, at); pen.stroke(); }
  }
  pen.restore();
}

const axisName = () => ({ step: "step", time: "time up", tokens: "tokens" })[view.axis];
const axisValue = value => view.axis === "time" ? clock(value) : value >= 1e7 ? `${number(value / 1e6)} M` :
  value.toLocaleString("en", { maximumFractionDigits: 1 });

function describe(panel, found) {
  const said = found.map(one => {
    const values = one.y.filter(value => value != null);
    let low = Infinity, high = -Infinity;
    for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
    return `${one.label}: ${number(values[0])} at first, ${number(values.at(-1))} at last, lowest ${number(low)}, highest ${number(high)}`;
  });
  return `${panel[0]}${panel[1] ? " in " + panel[1] : ""} over ${axisName()}. ${said.join(". ")}. Arrow keys move along the curve, Escape undoes a zoom.`;
}

function chart(panel) {
  const found = series(panel);
  if (!found.length) return null;
  const [title, unit, what, , options] = panel;
  const holder = el("div", { class: "plot", tabindex: "0", role: "img", "aria-label": describe(panel, found) });
  const toggled = view.tables.has(title);
  const button = el("button", { type: "button", "aria-expanded": String(toggled), "aria-label": `${title} as a table`,
    onclick: () => { if (!view.tables.delete(title)) view.tables.add(title); render(); } }, "table");
  const unitNow = title === "Speed" && RUNS[0].card.some(row => row[0] === "samples/s") ? "samples/s" : unit;
  const box = el("figure", {}, el("figcaption", {}, el("h3", {}, title, unitNow && el("span", { class: "soft" }, ` ${unitNow}`)), button), holder);
  if (what) holder.title = what;
  if (toggled) box.append(numbers(found));
  const log = options.log && view.log && spread(found) > 2.5;  // else both scales look the same
  const sets = found.flatMap(one => one.raw ? [[one.x, one.raw], [one.x, one.y]] : [[one.x, one.y]]);
  const data = sets.length > 1 ? uPlot.join(sets.map(set => set)) : sets[0];
  const style = one => ({ label: one.label, stroke: one.color, width: 1.6, dash: one.dash, spanGaps: true,
    value: (u, value) => number(value),
    paths: options.dots ? () => null : options.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
    points: { show: options.dots || one.x.length < 40, size: 5, fill: one.color } });
  const shown = found.flatMap(one => one.raw
    ? [{ ...style(one), label: one.label + ", raw", stroke: one.color + "55", width: 1, points: { show: false } }, style(one)] : [style(one)]);
  const axes = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "11px system-ui" };
  plots.push(() => {
    const whole = extent();
    const u = new uPlot({
      width: Math.max(220, holder.clientWidth), height: 210, padding: [14, 28, 0, 0],
      cursor: { sync: { key: "runs", setSeries: false }, drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => { later(unzoom); return null; } } },
      scales: { x: { time: false, range: () => view.zoom || whole }, y: { distr: log ? 3 : 1,
        range: (_, low, high) => log ? magnitudes(low, high) : range(low, high, options.zero) } },
      axes: [{ ...axes, size: 34, values: (_, splits) => splits.map(axisValue), space: 60 },
        { ...axes, size: 58, values: (_, splits) => splits.map(value => value == null ? "" : number(value)) }],
      series: [{ label: axisName(), value: (_, value) => value == null ? "–" : axisValue(value) }, ...shown],
      hooks: { draw: [lines], setSelect: [u => {
        if (u.select.width < 4) return;
        const low = u.posToVal(u.select.left, "x"), high = u.posToVal(u.select.left + u.select.width, "x");
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        if (high > low) later(() => zoomTo([low, high]));
      }] },
    }, data, holder);
    u.clipLine = options.clip && !MANY ? RUNS[0].clip : null;
    if (u.clipLine != null) u.redraw(false);
    const move = by => {
      const at = Math.min(u.data[0].length - 1, Math.max(0, (u.cursor.idx ?? (by > 0 ? -1 : u.data[0].length)) + by));
      u.setCursor({ left: u.valToPos(u.data[0][at], "x"), top: 40 });
    };
    holder.addEventListener("keydown", event => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
      if (steps) { move(steps); event.preventDefault(); }
      else if (event.key === "Escape" && view.zoom) unzoom();
    });
    return u;
  });
  return box;
}

function spread(found) {
  let low = Infinity, high = 0;
  for (const one of found) for (const value of one.y) { low = Math.min(low, value); high = Math.max(high, value); }
  return low > 0 ? high / low : 0;
}

function magnitudes(low, high) {
  // uPlot labels a log axis from its lower end on, so that end should be a round number.
  const size = 10 ** Math.floor(Math.log10(low));
  return [Math.floor(low / size) * size, high * 1.04];
}

function range(low, high, zero) {
  if (low == null) return [0, 1];
  if (zero) low = Math.min(0, low);
  if (low === high) return [low - Math.abs(low) / 2 - (low ? 0 : 0.5), high + Math.abs(high) / 2 + (high ? 0 : 0.5)];
  const room = (high - low) * 0.06;
  return [zero && low === 0 ? 0 : low - room, high + room];
}

function numbers(found) {
  const rows = [], first = found[0], every = Math.max(1, Math.ceil(first.x.length / 40));
  const at = (one, x) => { let n = 0; while (n < one.x.length - 1 && one.x[n + 1] <= x) n++; return one.x.length && one.x[n] <= x ? one.y[n] : null; };
  for (let n = 0; n < first.x.length; n += every) rows.push([axisValue(first.x[n]), ...found.map(one => number(at(one, first.x[n])))]);
  if (first.x.length && (first.x.length - 1) % every) rows.push([axisValue(first.x.at(-1)), ...found.map(one => number(at(one, first.x.at(-1))))]);
  return table([axisName(), ...found.map(one => one.label)], rows, true);
}

let waits;
function later(action) {
  // The action destroys the chart whose event is being handled, so it runs after the event. All
  // charts send the same event, so it runs once.
  clearTimeout(waits);
  waits = setTimeout(action);
}

function zoomTo(range) {
  view.zoom = range;
  redraw();
  if (LIVE && view.axis === "step") more(range);
}

function unzoom() { view.zoom = detail = null; redraw(); }

async function more([low, high]) {
  const turn = ++asked;
  try {
    const found = await Promise.all(RUNS.map((_, n) => ask({ run: n, from: low, to: high })));
    if (turn !== asked || !view.zoom) return;
    detail = found.map(one => one.curves);
    redraw();
  } catch (error) { tell(String(error.message || error)); }
}

// --- comparison, samples, texts -------------------------------------------------------------------

function comparison() {
  const value = (run, what) => (run.card.find(row => row[0] === what) || [])[1] || "–";
  const columns = ["loss", "validation loss", "perplexity", "step", "tokens/s", "failures", "steps lost", "goodput", "up"];
  const rows = RUNS.map((run, n) => {
    const swatch = el("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = color(n);
    return [el("span", {}, swatch, run.name), run.state[0], ...columns.map(what => value(run, what))];
  });
  const parts = [el("h2", {}, "Runs"), table(["run", "state", ...columns], rows)];
  parts.push(el("h2", {}, "Keys of the recipes that differ"));
  parts.push(DATA.differing.length ? table(["key", ...RUNS.map(run => run.name)], DATA.differing)
    : el("p", { class: "soft" }, "None, but for run.dir."));
  return el("section", { "aria-label": "Comparison" }, parts);
}

function samples(run) {
  if (!run.samples.length) return null;
  const last = run.samples.length - 1, name = `Step of the samples of ${run.name}`;
  const out = el("div", {}), said = el("output", { class: "soft" });
  const slider = el("input", { type: "range", min: 0, max: last, disabled: !last, "aria-label": name,
    oninput: event => show(+event.target.value, true) });
  const show = (n, chosen) => {
    const { step, pairs } = run.samples[n], words = `after step ${step.toLocaleString("en")}`;
    // The step is kept, because indices change with new samples; null: follow the newest step.
    if (chosen) run.sampleStep = n === last ? null : step;
    slider.value = n;
    slider.setAttribute("aria-valuetext", words);
    said.replaceChildren(words);
    out.replaceChildren(...pairs.map(([prompt, text]) => el("div", { class: "sample" }, el("b", {}, prompt), text)));
  };
  const kept = run.samples.findIndex(one => one.step === run.sampleStep);
  show(kept < 0 ? last : kept, false);
  return el("section", { "aria-label": `${run.name}: samples` }, el("h2", {}, "Samples"),
    el("label", { class: "controls" }, "step", slider, said), out);
}

function texts(run) {
  const facts = el("dl", { class: "facts" }, run.facts.map(([what, value]) => [el("dt", {}, what), el("dd", {}, value)]));
  return [facts, attemptTable(run),
    run.log.length ? el("details", { "data-key": `${run.name} log` }, el("summary", {}, "Last lines"), el("pre", { tabindex: "0" }, run.log.join("\n"))) : null,
    run.recipe ? el("details", { "data-key": `${run.name} recipe` }, el("summary", {}, "Recipe"), el("pre", { tabindex: "0" }, run.recipe)) : null];
}

function controls() {
  const choose = el("select", { "aria-label": "Curves over", onchange: event => { view.axis = event.target.value; view.zoom = detail = null; redraw(); } },
    [["step", "steps"], ["time", "time up"], ["tokens", "tokens"]].filter(([value]) => value === "step" || RUNS.every(run => run.axis[value].length)).map(([value, text]) => el("option", { value, selected: view.axis === value }, text)));
  return el("div", { class: "controls" },
    el("label", {}, "over", choose),
    el("label", {}, el("input", { type: "checkbox", checked: view.log, onchange: event => { view.log = event.target.checked; redraw(); } }), "loss on a log scale"),
    el("label", {}, "smooth", el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smooth, "aria-label": "Smoothing of loss and gradient norm",
      oninput: event => { view.smooth = +event.target.value; redraw(); } })),
    el("button", { type: "button", id: "unzoom", onclick: unzoom, hidden: !view.zoom }, "whole run"),
    el("span", { class: "soft" }, "drag over a chart to zoom, double-click for all"));
}

// --- all of it --------------------------------------------------------------------------------------

const main = document.getElementById("main"), grid = el("div", { class: "charts" });
let drawn = [];

function redraw() {
  for (const u of drawn) u.destroy();
  plots = [];
  grid.replaceChildren(...panelsNow().map(chart).filter(Boolean));
  drawn = plots.map(draw => draw());
  const button = document.getElementById("unzoom");
  if (button) button.hidden = !view.zoom;
}

function render() {
  const open = new Set([...main.querySelectorAll("details[open]")].map(one => one.dataset.key));
  main.style.minHeight = `${main.offsetHeight}px`;  // or the page would jump
  const focus = document.activeElement && document.activeElement.getAttribute("aria-label");
  document.getElementById("title").textContent = RUNS.map(run => run.name).join(" · ");
  const parts = [];
  if (MANY) parts.push(comparison());
  RUNS.forEach(run => {
    parts.push(el("section", { "aria-label": `${run.name}: where it stands`, class: "top" },
      MANY ? [el("h2", {}, run.name), headline(run)] : top(run)));
    if (!reading(run)) parts.push(el("section", { "aria-label": `${run.name}: what happened` },
      MANY ? null : el("h2", { id: "events", tabindex: "-1" }, "What happened"), ribbon(run),
      MANY ? el("details", { "data-key": `${run.name} events` }, el("summary", {}, `Events (${run.events.length})`), eventList(run)) : eventList(run)));
  });
  parts.push(el("section", { "aria-label": "Curves" }, el("h2", {}, "Curves"), controls(), grid));
  RUNS.forEach(run => {
    const written = samples(run), inside = texts(run).filter(Boolean);
    if (written) parts.push(written);
    parts.push(el("section", { "aria-label": `${run.name}: what it is` }, MANY ? el("h2", {}, run.name) : el("h2", {}, "The run"), inside));
  });
  main.replaceChildren(...parts);
  main.querySelectorAll("details").forEach(one => { one.open = open.has(one.dataset.key); });
  redraw();
  main.style.minHeight = "";
  if (focus) { const again = [...main.querySelectorAll("[aria-label]")].find(one => one.getAttribute("aria-label") === focus); if (again) again.focus(); }
}

// --- live ---------------------------------------------------------------------------------------------

const token = new URLSearchParams(location.search).get("token") || "";
const tell = text => { const place = document.getElementById("live"); if (place.textContent !== text) place.textContent = text; };

async function ask(what) {
  const answer = await fetch("data?" + new URLSearchParams({ ...what, token }), { cache: "no-store" });
  if (!answer.ok) throw new Error(`the server answers ${answer.status}: ${(await answer.text()).slice(0, 200)}`);
  return answer.json();
}

function take(run, told) {
  if (told.restart) { Object.assign(run, told); return true; }
  for (const [key, [x, y]] of Object.entries(told.curves)) {
    const curve = run.curves[key] || (run.curves[key] = [[], []]);
    curve[0].push(...x); curve[1].push(...y);
    run.curves[key] = thinnedOut(curve);
  }
  Object.assign(run.curves, told.more || {});
  const fresh = Object.keys(told.curves).length > 0 || Boolean(told.events) || Boolean(told.samples) || told.state[0] !== run.state[0];
  const { curves, more, last, ...rest } = told;
  Object.assign(run, rest);
  if (!told.ribbon && last.length && run.ribbon.length) run.ribbon[run.ribbon.length - 1] = last[0];
  return fresh;
}

async function follow() {
  let wait = RUNS.some(reading) ? 0.3 : DATA.every;
  if (!document.hidden) {
    try {
      let changed = overdue;
      for (let n = 0; n < RUNS.length; n++) {
        const run = RUNS[n];
        changed = take(run, await ask({ run: n, ...run.cursor })) || changed;
      }
      tell(`live · ${moment(Date.now() / 1000, false)}`);
      const busy = main.contains(document.activeElement) && document.activeElement.matches("input,select");
      overdue = changed && busy;
      if (changed && !busy) render();
      else if (!MANY) main.querySelector(".top").replaceChildren(...top(RUNS[0]));
      document.title = `${RUNS[0].state[0]} · ${RUNS.map(run => run.name).join(", ")}`;
    } catch (error) {
      tell(`no answer: ${error.message}; the page shows what it had`);
      wait = Math.min(30, 3 * DATA.every);
    }
  }
  setTimeout(follow, 1000 * wait);
}

let resized;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(redraw, 150); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

render();
if (LIVE) {
  tell("live");
  setTimeout(follow, RUNS.some(reading) ? 300 : 1000 * DATA.every);
} else tell(`as of ${moment(Math.max(...RUNS.map(run => run.now)), true)}`);
})();
