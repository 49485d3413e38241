// The page: asks the observer each second what there is to see, and shows it. Names may be hostile,
// so they are put in as text and never as markup.
import { Plot, Points, fillBar, fillLegend, html, say, svg } from "/plots.js";

const RING = ["k0", "k6", "k4"]; // leased, ready, filling
const ringColour = (index) => RING[index];
const NO_CPU = "no CPU", NO_CPU_COLOUR = "k5"; // grey: no work is done
const PARTS = ["k0", "k1", "k2", "k3", "k4", "k6", "k7"];
const LOOK_MS = 1000, HISTORY_MS = 5000, FINE_HISTORY_MS = 2000, FINE_S = 60, RANGE_S_MIN = 20, RANGE_S_MAX = 900,
  TRAINERS_MAX = 16, UNFOLDED_MAX = 6, BAD_MS = 10000, SHEET_AGAIN_MS = 1000, REST_MS_MIN = 0.01;
const ANSWER_MS = 5000; // a way that has gone silent ends no request by itself
const $ = (id) => document.getElementById(id);
const get = (address) => fetch(address, { signal: AbortSignal.timeout(ANSWER_MS) });

// --- words

const number = (value, digits = 0) =>
  value === null || value === undefined
    ? "–"
    : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (value) => `${Math.round(value)}%`;
const share = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)}%`);
const short = (value) =>
  value >= 1e6 ? `${+(value / 1e6).toPrecision(3)} M` : value >= 1e4 ? `${+(value / 1e3).toPrecision(3)} k` : `${+value.toPrecision(3)}`;
const bytes = (value) => (value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${Math.round(value / 2 ** 20)} MiB`);
const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (hours >= 48) return `${Math.floor(hours / 24)} days`;
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.floor(seconds % 60)} s`;
}

// --- tables: their columns come with the rows; only changed cells are touched

function fillTable(section, columns, rows) {
  section.hidden = false;
  section.querySelector(".empty").hidden = rows.length > 0;
  section.querySelector("table").hidden = rows.length === 0;
  const head = section.querySelector("thead tr"), body = section.querySelector("tbody");
  if (!head.children.length)
    for (const [title, kind] of columns) {
      head.append(html("th", { role: "columnheader", scope: "col", class: kind === "number" ? kind : "" }));
      say(head.lastChild, title);
    }
  while (body.children.length > rows.length) body.lastChild.remove();
  while (body.children.length < rows.length) body.append(html("tr", { role: "row" }));
  rows.forEach(({ cells }, index) => fillRow(body.children[index], cells.map((one, at) => cell(one, ...columns[at]))));
}

// A cell of the observer is [text, look, notes below it].
function cell([text, look, notes], title, kind) {
  const label = kind === "name" || kind === "verdict" ? "" : title;
  const first = ["span", look && `pill ${look}`, text === "-" ? "–" : text];
  return { label, kind, parts: [first, ...notes.map((note) => ["small", "", note])] };
}

function fillRow(row, cells) {
  while (row.children.length < cells.length) row.append(html("td", { role: "cell" }));
  cells.forEach(({ text, label, kind = "", parts }, index) => {
    const cell = row.children[index];
    if (cell.className !== kind) cell.className = kind;
    if (label) cell.dataset.label = label;
    if (!parts) return say(cell, text);
    while (cell.children.length > parts.length) cell.lastChild.remove();
    parts.forEach(([tag, kindOfPart, words], at) => {
      let part = cell.children[at];
      if (!part || part.localName !== tag) {
        part = html(tag);
        cell.children[at] ? cell.children[at].replaceWith(part) : cell.append(part);
      }
      if (part.className !== kindOfPart) part.className = kindOfPart;
      say(part, words);
    });
  });
}

// --- worker hosts: the section is there if the daemon admits some

function showPool(pool, columns) {
  if (!pool) return ($("hosts").hidden = true);
  say($("hosts-summary"), pool.summary);
  const notes = $("hosts-notes");
  while (notes.children.length > pool.notes.length) notes.lastChild.remove();
  while (notes.children.length < pool.notes.length) notes.append(html("li"));
  pool.notes.forEach((note, index) => say(notes.children[index], note));
  fillTable($("hosts"), columns, pool.hosts);
  const more = pool.hosts_count - pool.hosts.length;
  $("hosts-more").hidden = more === 0;
  say($("hosts-more"), `and ${counted(more, "worker host")} more`);
}

// --- no trainer: lines that make one

const python = (text) => JSON.stringify(text).replace(/[\u007f-\uffff]/g, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);

function showConnect({ trainers, streams, address }) {
  const stream = streams.find((one) => one.stopped === null);
  const isIdle = trainers.length === 0 && stream !== undefined && address !== "";
  $("connect").hidden = !isIdle;
  if (!isIdle) return;
  const field = stream.description.fields[0]?.split(" ")[0] ?? "index";
  const lines = [
    "import batchd_client",
    "",
    `with batchd_client.connect(${python(address)}) as daemon:`,
    `    for batch in daemon.stream(${python(stream.name)}):`,
    `        print(batch[${python(field)}].shape)`,
  ];
  say($("connect-lines"), lines.join("\n"));
}

$("connect-copy").addEventListener("click", async () => {
  const lines = $("connect-lines");
  // where a page may not write to the clipboard, Ctrl-C does
  getSelection().selectAllChildren(lines);
  try {
    await navigator.clipboard.writeText(lines.textContent);
    say($("connect-copy"), "copied");
  } catch {
    say($("connect-copy"), "press Ctrl-C");
  }
  setTimeout(() => say($("connect-copy"), "copy"), 2000);
});

// --- many trainers: those that wait most, until a user wants all

let showsAll = false;

function showTrainers(trainers, columns) {
  const byWait = (one, other) => (other.wait_share ?? 0) - (one.wait_share ?? 0);
  const shown = showsAll || trainers.length <= TRAINERS_MAX ? trainers : [...trainers].sort(byWait).slice(0, TRAINERS_MAX);
  fillTable($("trainers"), columns, shown);
  $("trainers-more").hidden = trainers.length <= TRAINERS_MAX;
  say($("trainers-more").firstChild, showsAll ? `show the ${TRAINERS_MAX} that wait most` : `these wait most: show all ${number(trainers.length)} trainers`);
}

// --- streams: one section each, which stays while its stream does

const DESCRIBED = { source: "source", samples: "samples", fields: "batch", pipeline: "pipeline" };

function description(one) {
  const { source, fields, pipeline } = one.description;
  return {
    source,
    samples: one.is_live
      ? `live, in batches of ${number(one.batch_size)}`
      : `${number(one.samples)}${one.repeats > 1 ? `, each ${number(one.repeats)} times` : ""}, ${counted(one.steps, "step")} of ${number(one.batch_size)} an epoch`,
    fields: fields.join(", "),
    pipeline: pipeline.join(" → "),
  };
}

class Stream {
  constructor(name, isFolded) {
    this.name = name;
    this.title = html("h2");
    say(this.title, name);
    this.delivered = html("b");
    this.decoded = html("b");
    this.stopped = html("p", { class: "notice", hidden: "" });
    this.facts = Object.fromEntries(Object.keys(DESCRIBED).map((key) => [key, html("dd")]));
    this.about = html("dl", { class: "about" }, ...Object.entries(DESCRIBED).map(([key, title]) => html("div", {}, html("dt", {}, title), this.facts[key])));
    this.partNames = [];
    this.ring = bar("ring");
    this.parts = bar("a sample's time");
    this.plots = {
      rates: new Plot({ title: "Throughput", unit: "samples/s", format: short, exact: number }),
      waits: new Plot({ title: "Trainers wait", unit: "% of the time", format: percent, top: 100, isOfRuns: true }),
      ring: new Plot({ title: "Ring", unit: "slots", format: short, exact: number, isStacked: true, colours: ringColour }),
      parts: new Plot({ title: "A sample's time", unit: "ms", format: short, exact: (value) => number(value, 2), isStacked: true, colours: (_index, name) => this.partColour(name) }),
    };
    this.sheet = new Sheet(name);
    this.losses = new Losses(name);
    this.bad = new Bad(name);
    const plots = html("div", { class: "plots" }, ...Object.values(this.plots).map((plot) => plot.node));
    this.node = html(
      "section",
      {},
      html("div", { class: "stream-head" }, this.title, figure(this.delivered, "delivered/s"), figure(this.decoded, "decoded/s")),
      this.about,
      this.stopped,
      html("div", { class: "bars" }, this.ring.node, this.parts.node),
      isFolded ? html("details", {}, html("summary", {}, "Plots"), plots) : plots,
      this.losses.node,
      this.sheet.node,
      this.bad.node,
    );
    this.node.setAttribute("aria-label", `stream ${name}`);
  }

  show(one, trainers) {
    this.hasRanks = trainers.some(({ world_size }) => world_size > 1);
    say(this.delivered, number(one.delivered_per_s));
    say(this.decoded, number(one.decoded_per_s));
    const trouble = one.stopped !== null ? `has stopped: ${one.stopped}` : one.away !== null ? `waits for its storage, for ${number(one.away_s)} s so far: ${one.away}` : "";
    this.stopped.hidden = trouble === "";
    say(this.stopped, trouble);
    for (const [key, text] of Object.entries(description(one))) {
      say(this.facts[key], text);
      this.facts[key].parentNode.hidden = text === "";
    }
    const slots = [["leased", one.leased_slots], ["ready", one.ready_slots], ["filling", one.filling_slots]];
    const free = Math.max(0, one.slots_max - one.leased_slots - one.ready_slots - one.filling_slots);
    fillBar(this.ring.svg, slots.map(([, count], index) => [count, ringColour(index)]), one.slots_max);
    fillLegend(this.ring.legend, [
      ...slots.map(([name, count], index) => ({ name, value: number(count), kind: ringColour(index) })),
      { name: one.partial_slots ? `free, ${one.partial_slots} of them with an unfinished batch` : "free", value: number(free), kind: "kfree" },
    ]);
    say(this.ring.title, "ring");
    say(this.ring.value, `${counted(one.slots_max, "slot")} of ${counted(one.batch_size, "sample")}`);
    fillBar(this.parts.svg, one.parts.map(([name, ms]) => [ms, this.partColour(name)]), Math.max(one.sample_ms ?? 0, total(one.parts)));
    const rest = (one.sample_ms ?? 0) - total(one.parts);
    const times = one.parts.map(([name, ms]) => ({ name, value: `${number(ms, 2)} ms`, kind: this.partColour(name) }));
    if (rest > REST_MS_MIN) times.push({ name: "between samples", value: `${number(rest, 2)} ms`, kind: "kfree" });
    fillLegend(this.parts.legend, times);
    say(this.parts.title, "a sample's time");
    say(this.parts.value, one.sample_ms === null ? "nothing decoded just now" : `${number(one.sample_ms, 2)} ms`);
    this.bad.show(one.bad_samples);
    this.losses.show(one.reports);
    this.plots.rates.now({ delivered: one.delivered_per_s, decoded: one.decoded_per_s });
    this.plots.ring.now(Object.fromEntries(slots));
    this.plots.parts.now(Object.fromEntries(one.parts));
    this.plots.waits.now(Object.fromEntries(trainers.map((trainer) => [this.waitName(trainer.name, trainer.rank), trainer.wait_share === null ? null : 100 * trainer.wait_share])));
  }

  // A part keeps its colour everywhere, also when other parts appear or disappear.
  partColour(name) {
    if (name === NO_CPU) return NO_CPU_COLOUR;
    if (!this.partNames.includes(name)) this.partNames.push(name);
    return PARTS[this.partNames.indexOf(name) % PARTS.length];
  }

  waitName = (name, rank) => (this.hasRanks ? `${name}, rank ${rank}` : name);

  plot(history) {
    const of = (kind) => history.series.filter((one) => one.kind === kind && one.of[0] === this.name);
    const first = (kind) => of(kind)[0]?.values ?? [];
    this.plots.rates.show(
      [{ name: "delivered", values: first("delivered_per_s") }, { name: "decoded", values: first("decoded_per_s") }],
      history,
    );
    this.plots.ring.show(
      ["leased", "ready", "filling"].map((name) => ({ name, values: first(`${name}_slots`) })),
      history,
    );
    this.plots.parts.show(of("part_ms").map(({ of: [, name], values }) => ({ name, values })), history);
    const waits = of("wait_share").map(({ of: [, name, rank], values }) => ({ name, rank, values: values.map((one) => one === null ? null : 100 * one) }));
    this.plots.waits.show(waits.map(({ name, rank, values }) => ({ name: this.waitName(name, rank), values })), history);
  }
}

const total = (parts) => parts.reduce((sum, [, ms]) => sum + ms, 0);
const figure = (value, label) => html("div", { class: "figure" }, value, html("span", { class: "label" }, label));

function bar(name) {
  const parts = {
    title: html("span", { class: "label" }),
    value: html("span", { class: "label" }),
    svg: svg("svg", { class: "bar", "aria-hidden": "true" }),
    legend: html("ul", { class: "legend", "aria-label": name }),
  };
  parts.node = html("div", {}, html("div", { class: "bar-title" }, parts.title, parts.value), parts.svg, parts.legend);
  return parts;
}

// A picture costs the daemon a slot for a moment, so it is drawn only when a user opens it.
class Sheet {
  constructor(stream) {
    this.stream = stream;
    this.content = html("div");
    this.again = html("button", { type: "button" }, "draw the current one");
    this.node = html("details", { class: "sheet" }, html("summary", {}, "Current batch"), this.content);
    this.node.addEventListener("toggle", () => this.node.open && this.ask());
    this.again.addEventListener("click", () => this.ask());
  }

  async ask() {
    this.content.replaceChildren(html("p", { class: "label" }, "being drawn …"));
    try {
      let response;
      const address = `/sheet.png?stream=${encodeURIComponent(this.stream)}`;
      do {
        response = await get(address);
        if (response.status === 202) await new Promise((done) => setTimeout(done, SHEET_AGAIN_MS));
      } while (response.status === 202 && this.node.open);
      await this.take(response);
    } catch {
      this.content.replaceChildren(html("p", {}, "the observer cannot be reached"), this.again);
    }
  }

  async take(response) {
    if (response.headers.get("Content-Type") !== "image/png") {
      const text = html("pre");
      say(text, await response.text());
      return this.content.replaceChildren(text, this.again);
    }
    const src = URL.createObjectURL(await response.blob());
    const picture = html("img", { alt: `contact sheet of a batch of ${this.stream}`, src });
    for (const event of ["load", "error"]) picture.addEventListener(event, () => URL.revokeObjectURL(src), { once: true });
    this.content.replaceChildren(picture, html("p", {}, this.again));
  }
}

// What the loops reported of their batches, by position: one plot for each run.
class Losses {
  constructor(stream) {
    this.stream = stream;
    this.plots = new Map();
    this.node = html("div", { class: "plots losses", hidden: "" });
    this.askedMs = -Infinity;
    this.count = 0;
  }

  show(count) {
    this.node.hidden = count === 0;
    if (count === this.count || performance.now() - this.askedMs < BAD_MS) return;
    this.askedMs = performance.now();
    this.ask(count).catch(console.warn);
  }

  async ask(count) {
    const response = await get(`/losses.json?stream=${encodeURIComponent(this.stream)}`);
    if (!response.ok) return;
    const { runs } = await response.json();
    this.count = count;
    for (const [run, plot] of this.plots)
      if (!runs.some((one) => one.run === run)) {
        plot.node.remove();
        this.plots.delete(run);
      }
    for (const { run, reports } of runs) {
      if (!this.plots.has(run)) {
        this.plots.set(run, new Points(`Reported by ${run}, by epoch:step`));
        this.node.append(this.plots.get(run).node);
      }
      this.plots.get(run).show(reports);
    }
  }
}

class Bad {
  constructor(stream) {
    this.stream = stream;
    this.summary = html("summary");
    this.body = html("tbody");
    this.more = html("p", { class: "label" });
    const head = html("tr", {}, ...["path", "reason", "times"].map((name) => html("th", { scope: "col" }, name)));
    this.node = html("details", { class: "bad", hidden: "" }, this.summary, html("table", {}, html("thead", {}, head), this.body), this.more);
    this.node.addEventListener("toggle", () => this.ask());
    this.askedMs = -Infinity;
  }

  show(count) {
    this.node.hidden = count === 0;
    say(this.summary, counted(count, "bad sample"));
    if (performance.now() - this.askedMs > BAD_MS) this.ask();
  }

  async ask() {
    if (!this.node.open) return;
    this.askedMs = performance.now();
    let found;
    try {
      const response = await get(`/bad.json?stream=${encodeURIComponent(this.stream)}`);
      found = response.ok ? await response.json() : null;
    } catch {
      found = null;
    }
    if (!found) return say(this.more, "the daemon does not say which, just now");
    const { samples, left_out: leftOut, file } = found;
    while (this.body.children.length > samples.length) this.body.lastChild.remove();
    while (this.body.children.length < samples.length) this.body.append(html("tr"));
    samples.forEach((one, index) =>
      fillRow(this.body.children[index], [
        { text: one.path, kind: "name" },
        { text: one.reason, label: "reason" },
        { text: number(one.times), label: "times", kind: "number" },
      ]),
    );
    say(this.more, leftOut ? `and ${number(leftOut)} more${file ? `; all are in ${file}` : ""}` : "");
  }
}

// --- all of it

const streams = new Map();

function show(overview) {
  const { observer } = overview;
  const busy = overview.busy_share === null ? "" : `, ${share(overview.busy_share)} busy`;
  fillFacts([
    ["up", duration(overview.uptime_s + observer.age_s)],
    ["slots", bytes(overview.memory_bytes)],
    ["workers", `${overview.workers.length}${overview.pool ? ` and ${number(overview.pool.workers)} remote` : ""}${busy}`],
    ...(overview.worker_deaths ? [["worker deaths", number(overview.worker_deaths)]] : []),
    ["pid", String(overview.pid)],
    ["version", overview.version],
  ]);
  state(observer.up, overview.draining ? "draining" : observer.up ? "serving" : "no answer");
  notice(observer.up ? "" : `The daemon has given no answer for ${duration(observer.silent_s)}. These are its last numbers.`);
  say($("host"), overview.host ? ` on ${overview.host}` : "");
  document.title = overview.host ? `${overview.host} · batchd` : "batchd";
  uptimeS = overview.uptime_s + observer.age_s;
  showRange();
  $("range").hidden = overview.streams.length === 0;
  say($("window"), overview.seconds === null ? "first numbers in a second" : `numbers of the last ${Math.max(1, Math.round(overview.seconds))} s`);
  lastTrainers = [overview.trainers, overview.columns.trainers];
  showTrainers(...lastTrainers);
  showConnect(overview);
  showWarnings(overview.warnings);
  fillTable($("workers"), overview.columns.workers, overview.workers);
  fillTable($("usage"), overview.columns.usage, overview.usage);
  $("usage").hidden = overview.usage.length < 2;
  showPool(overview.pool, overview.columns.hosts);
  const names = new Set(overview.streams.map(({ name }) => name));
  for (const [name, stream] of streams)
    if (!names.has(name)) {
      stream.node.remove();
      streams.delete(name);
    }
  for (const one of overview.streams) {
    if (!streams.has(one.name)) {
      streams.set(one.name, new Stream(one.name, overview.streams.length > UNFOLDED_MAX));
      $("streams").append(streams.get(one.name).node);
    }
    streams.get(one.name).show(one, overview.trainers.filter(({ stream }) => stream === one.name));
  }
}

function showWarnings(lines) {
  $("warnings").hidden = lines.length === 0;
  const list = $("warnings").querySelector("ul");
  while (list.children.length > lines.length) list.lastChild.remove();
  while (list.children.length < lines.length) list.append(html("li", {}, html("time"), html("span", { class: "pill bad" }), html("span")));
  [...lines].reverse().forEach((line, index) => {
    const [when, level, text] = list.children[index].children;
    say(when, new Date(1000 * line.time_s).toLocaleTimeString());
    when.title = new Date(1000 * line.time_s).toLocaleString();
    say(level, line.level);
    say(text, line.text);
  });
}

function fillFacts(facts) {
  const list = $("facts");
  while (list.children.length > facts.length) list.lastChild.remove();
  while (list.children.length < facts.length) list.append(html("div", {}, html("dt"), html("dd")));
  facts.forEach(([name, value], index) => {
    say(list.children[index].children[0], name);
    say(list.children[index].children[1], value);
  });
}

function state(isGood, text) {
  $("state").className = `pill ${isGood && text === "serving" ? "good" : "bad"}`;
  say($("state"), text);
}

function notice(text) {
  $("notice").hidden = text === "";
  say($("notice"), text);
}

let lostMs = null;

async function look() {
  const askedMs = performance.now();
  let response, answer;
  try {
    response = await get("/overview.json");
    answer = response.ok ? await response.json() : await response.text();
  } catch {
    lostMs ??= askedMs;
    state(false, "gone");
    notice(`No answer for ${duration((performance.now() - lostMs) / 1000)}: the daemon has ended, or the network is down. Trying again.`);
    return;
  }
  lostMs = null;
  if (response.ok) return show(answer);
  state(false, "no answer");
  notice(response.status === 503 ? "The daemon has not answered yet." : answer);
}

// --- the time range: what a user chose, else since the daemon's start, but 15 minutes at most

let uptimeS = 0, chosen = "", lastTrainers = [[], []];

const isLong = () => uptimeS > RANGE_S_MAX;
const minutes = () => chosen || (isLong() ? String(RANGE_S_MAX / 60) : "");
const rangeS = () => (minutes() ? 60 * Number(minutes()) : Math.max(RANGE_S_MIN, Math.ceil(uptimeS)));

function showRange() {
  for (const one of $("range").querySelectorAll("button")) {
    one.hidden = !one.dataset.minutes && isLong();
    one.setAttribute("aria-pressed", String(one.dataset.minutes === minutes()));
  }
}

for (const button of $("range").querySelectorAll("button"))
  button.addEventListener("click", () => {
    chosen = button.dataset.minutes;
    showRange();
    remember().catch(console.warn);
  });

$("trainers-more").firstChild.addEventListener("click", () => {
  showsAll = !showsAll;
  showTrainers(...lastTrainers);
});

async function remember() {
  const response = await get(`/history.json?seconds=${rangeS()}`);
  if (!response.ok) return;
  const history = await response.json();
  for (const stream of streams.values()) stream.plot(history);
}

// One after the other, `everyMs()` apart, and not while the page is hidden; a failure is retried.
async function keep(ask, everyMs) {
  for (;;) {
    try {
      if (!document.hidden) await ask();
    } catch (error) {
      console.warn(error);
    }
    await new Promise((done) => setTimeout(done, everyMs()));
  }
}

await look().catch(console.warn); // there are streams to plot then
keep(look, () => LOOK_MS);
keep(remember, () => (rangeS() <= FINE_S ? FINE_HISTORY_MS : HISTORY_MS));
