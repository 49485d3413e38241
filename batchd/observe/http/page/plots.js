// Plots and bars, as SVG. Names are text; colours are classes, so that the style sheet decides.
const SVG = "http://www.w3.org/2000/svg";
const LEFT = 46, RIGHT = 8, TOP = 10, BOTTOM = 20, HEIGHT = 150, TIME_PIXELS = 48;
// between two times under a plot: the smallest that gives few of them
const APART_S = [5, 10, 15, 30, 60, 120, 300];
const TIMES_MAX = 4, LEGEND_MAX = 12, SHORT_MAX = 16, NAME_MAX = 24;

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function html(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const colour = (index) => `k${index % 8}`;

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A bar whose parts are [amount, class]; what is not nothing is seen.
export function fillBar(bar, parts, total) {
  while (bar.children.length > parts.length) bar.lastChild.remove();
  while (bar.children.length < parts.length) bar.append(svg("rect", { y: 0, height: "100%" }));
  let passed = 0;
  parts.forEach(([amount, kind], index) => {
    const share = total > 0 ? Math.max(0, Math.min(100 - passed, (100 * amount) / total)) : 0;
    const rect = bar.children[index];
    rect.setAttribute("x", `${passed}%`);
    rect.setAttribute("width", `${share}%`);
    rect.setAttribute("class", kind);
    passed += share;
  });
}

// Names for a legend: without what all begin with, if one is long, up to a border of words; of what
// is still too long, the two ends. Whoever points at a name sees all of it.
export function shortNames(names) {
  const [first, ...others] = names;
  let shared = 0;
  if (others.length && names.some((name) => name.length > SHORT_MAX))
    while (shared < first.length && others.every((name) => name[shared] === first[shared])) shared++;
  const begin = names.length ? (first.slice(0, shared).match(/^.*[^\p{L}\p{N}]/su)?.[0] ?? "") : "";
  const isRank = begin.endsWith(", rank ");
  const cut = isRank ? begin.length - "rank ".length : begin.length;
  return names.map((name) => {
    const short = cut > 1 ? `${isRank ? "" : "…"}${name.slice(cut)}` : name;
    const ends = Math.floor((NAME_MAX - 1) / 2);
    return short.length <= NAME_MAX ? short : `${short.slice(0, ends)}…${short.slice(-ends)}`;
  });
}

// A legend whose entries are {name, short, value, kind, isLine}; values are beside their names.
export function fillLegend(list, entries) {
  if (list.firstChild?.className === "label") list.firstChild.remove();
  while (list.children.length > entries.length) list.lastChild.remove();
  while (list.children.length < entries.length)
    list.append(html("li", {}, html("span", { "aria-hidden": "true" }), html("span"), html("span", { class: "value" })));
  entries.forEach(({ name, short = name, value, kind, isLine }, index) => {
    const [key, label, number] = list.children[index].children;
    key.setAttribute("class", `key ${kind}${isLine ? " line" : ""}`);
    say(label, short);
    if (label.title !== (short === name ? "" : name)) label.title = short === name ? "" : name;
    say(number, value);
  });
}

function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= value * 0.999);
}

export class Plot {
  // `unit` is what the numbers are; `format` writes one at the axis, `exact` one of the legend;
  // `isStacked`: areas on each other; `top`: of the axis, if it is fixed; `colours`: the class of
  // the nth series; `isOfRuns`: each is a run, by a short name, without those that read no more.
  constructor({ title, unit, format, exact = format, isStacked = false, top = null, colours = colour, isOfRuns = false }) {
    Object.assign(this, { title, unit, format, exact, isStacked, top, colours, isOfRuns });
    this.svg = svg("svg", { class: "plot", role: "img" });
    this.when = html("span", { class: "label" });
    this.legend = html("ul", { class: "legend" });
    this.node = html("figure", {}, html("figcaption", {}, html("span"), this.when), this.svg, this.legend);
    say(this.node.firstChild.firstChild, `${title}, ${unit}`);
    this.recorded = this.series = [];
    this.count = 2;
    this.at = null;
    this.current = {};
    new ResizeObserver(() => this.draw()).observe(this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  // `series`: [{name, values}], the newest value last, null where nothing is known.
  show(series, { points, step_s: stepS }) {
    this.recorded = series.filter(({ values }) => values.length === points).map((one, index) => ({ ...one, index }));
    this.count = points;
    this.stepS = stepS;
    this.at = this.at === null ? null : Math.min(this.at, points - 1);
    this.draw();
  }

  // The present values by name, which the legend has unless a user points at the past.
  now(values) {
    const isOther = this.isOfRuns && this.recorded.some(({ name }) => (name in values) !== (name in this.current));
    this.current = values;
    isOther ? this.draw() : this.tell();
  }

  point(event) {
    this.at = null;
    if (event) {
      const box = this.svg.getBoundingClientRect();
      const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
      this.at = Math.max(0, Math.min(this.count - 1, Math.round(share * (this.count - 1))));
    }
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.series = this.recorded.filter(({ name }) => !this.isOfRuns || name in this.current);
    const layers = this.layers();
    const highest = Math.max(0, ...layers.flatMap(({ upper }) => upper.filter((one) => one !== null)));
    const top = this.top ?? niceTop(highest);
    const x = (index) => LEFT + (index / Math.max(1, this.count - 1)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - Math.min(value, top) / top) * (HEIGHT - TOP - BOTTOM);
    const drawn = [...this.axes(x, y, top)];
    for (const layer of layers) drawn.push((this.isStacked ? area : line)(layer, this.colours(layer.index, layer.name), x, y));
    if (this.at !== null) drawn.push(svg("line", { class: "cursor", x1: x(this.at), x2: x(this.at), y1: TOP, y2: HEIGHT - BOTTOM }));
    this.svg.replaceChildren(...drawn);
    this.tell();
  }

  layers() {
    let below = new Array(this.count).fill(0);
    return this.series.map(({ name, values, index }) => {
      if (!this.isStacked) return { index, name, lower: null, upper: values };
      const lower = below;
      const upper = values.map((value, at) => (value === null ? null : lower[at] + value));
      below = upper.map((value, at) => value ?? lower[at]);
      return { index, name, lower, upper };
    });
  }

  *axes(x, y, top) {
    for (const value of [0, top / 2, top]) {
      yield svg("line", { class: value ? "grid" : "axis", x1: LEFT, x2: x(this.count - 1), y1: y(value), y2: y(value) });
      const label = svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" });
      label.textContent = this.format(value);
      yield label;
    }
    if (!this.stepS) return;
    const spanS = (this.count - 1) * this.stepS;
    const apartS = APART_S.find((one) => spanS / one <= TIMES_MAX) ?? APART_S.at(-1);
    for (let agoS = 0; agoS <= spanS; agoS += apartS) {
      const at = x((1 - agoS / spanS) * (this.count - 1));
      const anchor = agoS === 0 ? "end" : at - LEFT < TIME_PIXELS / 2 ? "start" : "middle";
      const label = svg("text", { x: at, y: HEIGHT - 4, "text-anchor": anchor });
      label.textContent = agoS === 0 ? "now" : agoS % 60 ? `−${agoS} s` : `−${agoS / 60} min`;
      yield label;
    }
  }

  // What the legend says: the values under the pointer, or else the newest there are.
  tell() {
    const valueOf = (name, values) => (this.at === null ? this.current[name] : values[this.at]) ?? null;
    const names = this.series.map(({ name }) => name);
    const short = this.isOfRuns ? shortNames(names) : names;
    const all = this.series.map(({ name, values, index }, at) => {
      const value = valueOf(name, values);
      return { name, short: short[at], value: value === null ? "–" : this.exact(value), kind: this.colours(index, name), isLine: !this.isStacked, amount: value ?? -1 };
    });
    const entries = all.length <= LEGEND_MAX ? all : [...all].sort((one, other) => other.amount - one.amount).slice(0, LEGEND_MAX);
    const left = all.length - entries.length;
    fillLegend(this.legend, left ? [...entries, { name: `and ${left} more`, value: "", kind: "knone" }] : entries);
    if (!entries.length) this.legend.replaceChildren(html("li", { class: "label" }, "nothing yet"));
    const agoS = this.at === null ? 0 : (this.count - 1 - this.at) * this.stepS;
    say(this.when, agoS ? `${Math.floor(agoS / 60)} min ${Math.round(agoS % 60)} s ago` : "");
    const words = entries.map(({ name, value }) => `${name} ${value}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title} of the last ${Math.round((this.count * (this.stepS ?? 0)) / 6) / 10} minutes, in ${this.unit}; now: ${words || "nothing"}`);
  }
}

const AROUND = 50, DEVIATIONS = 3.5, MAD_SCALE = 1.4826;

function median(values) {
  const sorted = [...values].sort((one, other) => one - other);
  return sorted.length ? (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2 : 0;
}

// Marks values far above those around them, as `batchd blame` counts; null is no number, and always
// marked.
export function outliers(values) {
  const near = (all, index) => all.slice(Math.max(0, index - AROUND), index + AROUND + 1).filter((one) => one !== null);
  const usual = values.map((_value, index) => median(near(values, index)));
  const away = values.map((value, index) => (value === null ? null : Math.abs(value - usual[index])));
  return values.map((value, index) => value === null || value - usual[index] > DEVIATIONS * Math.max(MAD_SCALE * median(near(away, index)), 1e-6 * Math.abs(usual[index])));
}

// Values by position: points of [epoch, step, rank, value or null], in order; outliers are circles,
// and have their positions in words.
export class Points {
  constructor(title) {
    this.svg = svg("svg", { class: "plot", role: "img" });
    this.said = html("p", { class: "label" });
    this.node = html("figure", {}, html("figcaption", {}, html("span")), this.svg, this.said);
    say(this.node.firstChild.firstChild, title);
    this.points = [];
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  show(points) {
    this.points = points;
    this.far = outliers(points.map(([, , , value]) => value));
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width || !this.points.length) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const values = this.points.map(([, , , value]) => value).filter((value) => value !== null);
    const low = Math.min(0, ...values), high = niceTop(Math.max(0, ...values));
    const x = (index) => LEFT + (index / Math.max(1, this.points.length - 1)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const drawn = [];
    for (const value of [low, (low + high) / 2, high]) {
      drawn.push(svg("line", { class: value ? "grid" : "axis", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
      const label = svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" });
      label.textContent = `${+value.toPrecision(3)}`;
      drawn.push(label);
    }
    for (const [index, anchor] of [[0, "start"], [this.points.length - 1, "end"]]) {
      const label = svg("text", { x: x(index), y: HEIGHT - 4, "text-anchor": anchor });
      label.textContent = this.words(index);
      drawn.push(label);
    }
    drawn.push(line({ index: 0, upper: this.points.map(([, , , value]) => value) }, "k0", x, y));
    this.points.forEach(([, , , value], index) => {
      if (!this.far[index]) return;
      const circle = svg("circle", { class: "outlier", cx: x(index), cy: y(value ?? high), r: 4 }, svg("title"));
      circle.firstChild.textContent = `${this.words(index)}: ${value === null ? "not a number" : +value.toPrecision(4)}`;
      drawn.push(circle);
    });
    this.svg.replaceChildren(...drawn);
    const far = this.points.map((_point, index) => index).filter((index) => this.far[index]);
    const listed = far.slice(-LEGEND_MAX).reverse().map((index) => this.words(index)).join(", ");
    say(this.said, far.length ? `${far.length} far above the usual: ${listed}${far.length > LEGEND_MAX ? ", …" : ""}; batchd blame says what was in them` : "none far above the usual");
    this.svg.setAttribute("aria-label", `${this.node.firstChild.textContent}, ${this.points.length} batches; ${this.said.textContent}`);
  }

  words(index) {
    const [epoch, step] = this.points[index];
    return `${epoch}:${step}`;
  }
}

// The pieces of a series between gaps, as lists of indices.
function pieces(values) {
  const found = [];
  let piece = [];
  values.forEach((value, index) => {
    if (value !== null) return piece.push(index);
    if (piece.length) found.push(piece);
    piece = [];
  });
  return piece.length ? [...found, piece] : found;
}

function line({ index, upper }, kind, x, y) {
  const path = pieces(upper).map((piece) => {
    const points = piece.map((at) => `${x(at).toFixed(1)} ${y(upper[at]).toFixed(1)}`);
    return `M${points.join("L")}${piece.length === 1 ? "h.1" : ""}`;
  });
  const dash = ["", " dashed", " dotted"][index % 3];
  return svg("path", { class: `line ${kind}${dash}`, d: path.join("") });
}

function area({ lower, upper }, kind, x, y) {
  const path = pieces(upper).map((piece) => {
    const ends = piece.length === 1 ? [Math.max(0, piece[0] - 0.8), Math.max(0.8, piece[0])] : null;
    const above = piece.map((at) => [x(at), y(upper[at])]);
    const under = piece.map((at) => [x(at), y(lower[at])]).reverse();
    const corners = ends
      ? [[x(ends[0]), above[0][1]], [x(ends[1]), above[0][1]], [x(ends[1]), under[0][1]], [x(ends[0]), under[0][1]]]
      : [...above, ...under];
    return `M${corners.map(([left, down]) => `${left.toFixed(1)} ${down.toFixed(1)}`).join("L")}Z`;
  });
  return svg("path", { class: `area ${kind}`, d: path.join("") });
}
