"use strict";
// Draws DATA, or, where it is null, what data.json says now, again and again.
const PALETTE = 8, POLL_MS = 3000, NARROW_PX = 600;

const color = (number) => theme(`--c${number % PALETTE}`);
const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const DAY = { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false };
const when = (at) => new Date(1000 * at).toLocaleString("en", DAY);

function node(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text; // never HTML: names and messages are anybody's
  return made;
}

function card(cards, title, note, isWide) {
  const made = node("section", isWide ? "card wide" : "card");
  made.append(node("h2", "", title));
  if (note) made.append(node("p", "note", note));
  cards.append(made);
  return made;
}

function chart(cards, title, note, traces, axes, isWide) {
  const place = node("div", "chart");
  card(cards, title, note, isWide).append(place);
  const axis = { gridcolor: theme("--grid"), zerolinecolor: theme("--line"), linecolor: theme("--line"), automargin: true };
  const { x, y, ...rest } = axes || {}, isNarrow = innerWidth < NARROW_PX;
  const below = { y: -0.3, yanchor: "top" }, above = { y: 1.02, yanchor: "bottom" };
  if (isNarrow && traces.length > 3) place.style.height = `${230 + 22 * traces.length}px`;
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 48, r: 12, t: 6, b: 40 },
    font: { color: theme("--text"), size: 12, family: "system-ui, sans-serif" },
    xaxis: { ...axis, title: { text: "step", standoff: 6 }, ...x }, yaxis: { ...axis, ...y },
    showlegend: traces.length > 1, legend: { orientation: "h", x: 0, font: { size: 11 }, ...(isNarrow ? below : above) },
    hovermode: "x unified", hoverlabel: { bgcolor: theme("--card"), bordercolor: theme("--line"), font: { color: theme("--text") } },
    ...rest,
  };
  Plotly.newPlot(place, traces, layout, { displayModeBar: false, responsive: true });
}

function line(name, x, y, number, more) {
  const { line: style, ...rest } = more || {};
  const few = x.length < 3 ? "markers" : "lines"; // a line of one point is not seen
  return { name, x, y, mode: few, line: { color: color(number), width: 1.8, ...style }, marker: { color: color(number) }, ...rest };
}

const known = (values) => values && values.some((value) => value !== null && value !== undefined);

function flat(name, steps, value, number) {
  return { name, x: [steps[0], steps[steps.length - 1]], y: [value, value], mode: "lines", line: { color: color(number), width: 1.5, dash: "dot" } };
}

function table(rows, head, options) {
  const { short = [], classes = () => "" } = options || {};
  const made = node("table");
  if (head) {
    const row = node("tr");
    head.forEach((text) => row.append(node("th", "", text)));
    made.append(row);
  }
  for (const cells of rows) {
    const row = node("tr", classes(cells));
    cells.forEach((text, number) => row.append(node("td", short.includes(number) ? "short" : "", text)));
    made.append(row);
  }
  const box = node("div", "scroll");
  box.append(made);
  return box;
}

function curves(cards, data) {
  const all = data.columns, steps = all.step, plan = data.plan;
  if (!steps.length) return;
  const averaged = all.averaged > 1 ? `each point is the mean of ${all.averaged} rows` : "";
  const losses = [line("training", steps, all.loss, 0)];
  Object.entries(data.evaluations).forEach(([name, rows], number) =>
    losses.push(line(name, rows.map((row) => row[0]), rows.map((row) => row[1]), number + 1, { mode: "lines+markers" })));
  if (data.skipped.length)
    losses.push({ name: "skipped", x: data.skipped, y: data.skipped.map(() => Math.max(...all.loss.filter((v) => v !== null))),
      mode: "markers", marker: { symbol: "x", color: theme("--c3"), size: 8 } });
  chart(cards, "Loss", averaged, losses, {}, true);
  if (known(all.tokens_per_s)) {
    const speeds = [line("seen", steps, all.tokens_per_s, 2)];
    if (plan && plan.tokens_per_s) speeds.push(flat("planned", steps, plan.tokens_per_s, 2));
    chart(cards, "Tokens per second", "", speeds, { y: { rangemode: "tozero" } });
  }
  if (known(all.mfu)) chart(cards, "MFU", "of the matrix products that the device was measured to do", [line("mfu", steps, all.mfu, 5)], { y: { rangemode: "tozero", tickformat: ".1%" } });
  if (known(all.lr)) chart(cards, "Learning rate", "", [line("lr", steps, all.lr, 4)], { y: { exponentformat: "e" } });
  if (known(all.grad_norm)) chart(cards, "Gradient norm", "before clipping", [line("norm", steps, all.grad_norm, 1)], {});
}

function times(cards, data) {
  const all = data.columns, steps = all.step, plan = data.plan;
  if (!steps.length) return;
  const bounds = Object.entries(all.bound);
  const total = bounds.reduce((sum, [, count]) => sum + count, 0);
  const words = bounds.map(([name, count]) => `${name} in ${Math.round((100 * count) / total)} %`).join(", ");
  const seconds = { y: { title: { text: "seconds" }, rangemode: "tozero" } };
  const lanes = [line("step", steps, all.seconds, 0, { line: { width: 2.6 } })];
  Object.entries(all.lane_seconds).forEach(([name, values], number) => lanes.push(line(name, steps, values, number + 1)));
  if (plan && plan.step_s) lanes.push(flat("step, planned", steps, plan.step_s, 0));
  chart(cards, "Where a step's time went", `Seconds that each lane worked; lanes work at the same time.${words ? ` Bound by ${words} of the steps.` : ""}`, lanes, seconds, true);
  const waits = Object.entries(all.waits);
  if (waits.length)
    chart(cards, "Longest waits", "who waited <- for which lane, and what with", waits.map(([name, values], number) =>
      ({ name, x: steps, y: values, type: "bar", marker: { color: color(number) } })), { barmode: "stack", bargap: 0, ...seconds }, true);
}

function ranks(cards, data) {
  if (!data.ranks) return;
  const { waited_s: waited, bytes, lost } = data.ranks;
  if (waited.length)
    chart(cards, "Waits of ranks for each other", "seconds within steps, since the run began or went on", [{
      x: waited.map((_, rank) => `rank ${rank}`), y: waited, type: "bar", marker: { color: color(6) } }],
      { x: { title: { text: "" } }, y: { title: { text: "seconds" }, rangemode: "tozero" }, hovermode: "closest" });
  if (bytes.length) card(cards, "Between ranks in a step", "of the first rank").append(table(bytes));
  if (lost.length) card(cards, "Ranks that were lost", "").append(table(lost.map(([at, text]) => [when(at), text]), null, { short: [0] }));
}

function memory(cards, data) {
  if (!data.memory.length) return;
  const place = card(cards, "Memory by tier", "");
  for (const tier of data.memory) {
    const box = node("div", "tier"), bar = node("div", "bar"), pools = node("div", "pools");
    const total = tier.pools.reduce((sum, pool) => sum + pool[1], 0);
    box.append(node("div", "", `${tier.title}: ${tier.text}`));
    tier.pools.forEach(([name, size, text], number) => {
      const part = node("div"), item = node("span"), dot = node("span", "dot");
      part.style.background = dot.style.background = color(number);
      part.style.width = `${(100 * size) / total}%`;
      part.title = `${name} ${text}`;
      bar.append(part);
      if (size < 0.002 * total) return;
      item.append(dot, `${name} ${text}`);
      pools.append(item);
    });
    box.append(bar, pools);
    place.append(box);
  }
}

function timeline(cards, data) {
  if (!data.timeline.length) return;
  const kinds = [...new Set(data.timeline.map((span) => span[1]))];
  const lanes = [...new Set(data.timeline.map((span) => span[0]))].reverse();
  const traces = kinds.map((kind, number) => {
    const spans = data.timeline.filter((span) => span[1] === kind);
    return {
      name: kind, type: "bar", orientation: "h", y: spans.map((span) => span[0]), base: spans.map((span) => span[2]),
      x: spans.map((span) => span[3] - span[2]), marker: { color: color(number) },
      hovertemplate: `${kind}: %{x:.4g} s<extra></extra>`,
    };
  });
  chart(cards, "Timeline of a step by lane", data.timeline_source, traces, {
    barmode: "overlay", hovermode: "closest", bargap: 0.25, showlegend: true,
    x: { title: { text: "seconds", standoff: 6 } }, y: { categoryorder: "array", categoryarray: lanes },
  }, true);
}

function draw(data) {
  const page = document.getElementById("page"), cards = node("div", "cards"), facts = node("div", "facts");
  page.querySelectorAll(".chart").forEach((place) => Plotly.purge(place));
  const header = node("header");
  header.append(node("h1", "", data.name), node("span", `state ${data.state}`, data.state));
  for (const [label, value] of data.facts.slice(1)) {
    const fact = node("div", "fact");
    fact.append(node("div", "label", label), node("div", "value", value));
    facts.append(fact);
  }
  const scroll = window.scrollY;
  page.replaceChildren(header, facts, cards);
  curves(cards, data);
  times(cards, data);
  timeline(cards, data);
  ranks(cards, data);
  memory(cards, data);
  if (data.comparison.length) card(cards, "Plan and fact", "").append(table(data.comparison, ["", "planned", "seen"]));
  if (data.events.length) {
    const rows = [...data.events].reverse().map(([at, , , text]) => [when(at), text]);
    card(cards, "Events", "", true).append(table(rows, null, {
      short: [0], classes: ([, text]) => (text.startsWith("error") ? "error" : "") }));
  }
  for (const [title, rows] of [["Settings", data.settings], ["Environment", data.environment]]) {
    if (!rows.length) continue;
    const box = node("details");
    box.append(node("summary", "", `${rows.length} values`), table(rows));
    card(cards, title, "").append(box);
  }
  window.scrollTo(0, scroll);
  document.body.dataset.drawn = "yes";
}

let shown = DATA, text = "";

async function poll() {
  try {
    const answer = await fetch("data.json", { cache: "no-store" });
    const next = await answer.text();
    if (answer.ok && next !== text && !document.querySelector("details[open]")) {
      text = next;
      shown = JSON.parse(next);
      draw(shown);
    }
  } catch (error) { /* the server is gone, or will be there again */ }
  setTimeout(poll, POLL_MS);
}

if (DATA) draw(DATA);
else poll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown && draw(shown));
