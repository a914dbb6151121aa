"use strict";
// The page of a report: unpacks the slices, draws them on a canvas, and the curves with uPlot. Texts of the run become
// text nodes only, never markup.

const MISSING = -(2 ** 31);
const meta = JSON.parse(document.getElementById("meta").textContent);
const byId = (id) => document.getElementById(id);
const element = (name, text) => {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  return made;
};

// Colors of Okabe and Ito, which people with any color vision tell apart; in the dark, black becomes white.
const COLORS = {
  orange: "#e69f00", sky: "#56b4e9", green: "#009e73", yellow: "#f0e442", blue: "#0072b2", red: "#d55e00",
  pink: "#cc79a7", gray: "#8b93a0", pale: "#c3c9d2",
};
const KINDS = {
  measuring: "pink", collecting: "pale", scoring: "sky", training: "blue", publishing: "orange", staging: "yellow",
  pausing: "orange", installing: "red", starting: "orange", up: "pale", checkpoint: "green", validation: "pink",
};
const BECAME = {
  consumed: "green", filtered: "yellow", dropped: "red", failed: "red", batched: "blue", generated: "sky",
  aborted: "orange", generating: "gray", resumed: "gray", queued: "gray",
};
const OUTCOMES = { generated: "green", aborted: "orange", failed: "red", lost: "red", stopped: "gray", running: "gray" };
const STEPS = ["#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#8b93a0"];
const CAUSES = ["blue", "red", "orange", "yellow", "pink", "sky", "gray", "green", "pale"];

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const seconds = (value) => {
  if (value >= 3600) return `${(value / 3600).toFixed(2)} h`;
  return value >= 100 ? `${value.toFixed(0)} s` : value >= 1 ? `${value.toFixed(2)} s` : `${(value * 1000).toFixed(1)} ms`;
};

// -- the columns ------------------------------------------------------------------------------------------------------

async function unpack() {
  const text = atob(byId("data").textContent);
  const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const columns = {};
  for (const [name, kind, offset, length] of meta.columns) {
    const type = kind === "float64" ? Float64Array : Int32Array;
    columns[name] = { kind, values: new type(buffer, offset, length) };
  }
  return columns;
}

class Slices {
  constructor(columns) {
    this.columns = columns;
    this.start = columns.start.values;
    this.end = columns.end.values;
    this.count = this.start.length;
    this.arrows = columns.arrows.values;
    this.group = columns.group ? columns.group.values : new Int32Array(this.count).fill(MISSING);
    this.tracks = [];
    let first = 0;
    for (const [process, name, count] of meta.tracks) {
      this.tracks.push({ process, name, first, last: first + count });
      first += count;
    }
    this.busy = new Float64Array(this.count + 1); // seconds of the slices before each
    for (let place = 0; place < this.count; place++) {
      this.busy[place + 1] = this.busy[place] + this.end[place] - this.start[place];
    }
  }

  get(name, place) {
    const column = this.columns[name];
    if (!column) return undefined;
    const value = column.values[place];
    if (column.kind === "float64") return Number.isNaN(value) ? undefined : value;
    if (value === MISSING) return undefined;
    return column.kind === "text" ? meta.texts[value] : value;
  }

  details(place) {
    const hidden = ["title", "arrows", "start", "end", "kind"];
    return meta.columns
      .map(([name]) => name)
      .filter((name) => !hidden.includes(name))
      .map((name) => [name.replaceAll("_", " "), this.get(name, place)])
      .filter(([, value]) => value !== undefined && value !== "");
  }

  // The first slice of a track that ends after a time.
  after(track, time) {
    let low = track.first;
    let high = track.last;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  at(track, time, slack) {
    const place = this.after(track, time - slack);
    return place < track.last && this.start[place] <= time + slack ? place : -1;
  }

  ofGroup(group) {
    const found = [];
    for (let place = 0; place < this.count; place++) if (this.group[place] === group) found.push(place);
    return found;
  }

  trackOf(place) {
    return this.tracks.findIndex((track) => track.first <= place && place < track.last);
  }

  // [causes, effects] of a slice.
  linked(place) {
    const found = [[], []];
    for (let one = 0; one < this.arrows.length; one += 2) {
      if (this.arrows[one + 1] === place) found[0].push(this.arrows[one]);
      if (this.arrows[one] === place) found[1].push(this.arrows[one + 1]);
    }
    return found;
  }
}

// -- the timeline -----------------------------------------------------------------------------------------------------

const LEFT = 132, AXIS = 22, IDLE = 64, ROW = 15, HEAD = 19;

class TimelineView {
  constructor(slices) {
    this.slices = slices;
    this.canvas = byId("timeline");
    this.context = this.canvas.getContext("2d");
    this.tip = byId("tip");
    this.from = 0;
    this.to = Math.max(meta.end, 1e-6);
    this.scroll = 0;
    this.chosen = -1;
    this.followed = new Set();
    this.track = 0;
    this.layOut();
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  layOut() {
    let y = 0;
    let process = null;
    this.heads = [];
    for (const track of this.slices.tracks) {
      if (track.process !== process) {
        process = track.process;
        this.heads.push([y, process]);
        y += HEAD;
      }
      track.y = y;
      y += ROW;
    }
    this.height = y + 8;
  }

  get top() { return AXIS + IDLE; }
  get width() { return this.canvas.clientWidth - LEFT; }
  x(time) { return LEFT + ((time - this.from) / (this.to - this.from)) * this.width; }
  time(x) { return this.from + ((x - LEFT) / this.width) * (this.to - this.from); }

  colorOf(place) {
    const slices = this.slices;
    const kind = slices.get("kind", place);
    if (kind !== "generating") return COLORS[KINDS[kind]] || COLORS.gray;
    const by = byId("coloring").value;
    const value = slices.get(by, place);
    if (by === "became") return COLORS[BECAME[value]] || COLORS.gray;
    if (by === "outcome") return COLORS[OUTCOMES[value]] || COLORS.gray;
    if (value === undefined) return COLORS.pale;
    return STEPS[by === "staleness" ? Math.min(value, STEPS.length - 1) : value % STEPS.length];
  }

  draw() {
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = 0;
      this.paint();
    });
  }

  paint() {
    const { canvas, context } = this;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    this.scroll = Math.max(0, Math.min(this.scroll, this.height - (height - this.top)));
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.theme = { back: style("--back"), panel: style("--panel"), text: style("--text"), soft: style("--soft"), line: style("--line") };
    context.fillStyle = this.theme.back;
    context.fillRect(0, 0, width, height);
    context.save();
    context.beginPath();
    context.rect(0, this.top, width, height - this.top);
    context.clip();
    this.paintTracks(height);
    this.paintFollowed();
    context.restore();
    this.paintAxis(width);
    this.paintIdle();
    canvas.dataset.from = this.from;
    canvas.dataset.to = this.to;
  }

  paintTracks(height) {
    const { context, slices } = this;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    slices.tracks.forEach((track, number) => {
      const y = this.top + track.y - this.scroll;
      if (y < this.top - ROW || y > height) return;
      if (number === this.track && document.activeElement === this.canvas) {
        context.fillStyle = this.theme.panel;
        context.fillRect(0, y, this.canvas.clientWidth, ROW);
      }
      context.globalAlpha = this.followed.size ? 0.3 : 1;
      this.paintTrack(track, y);
      context.globalAlpha = 1;
      context.fillStyle = this.theme.soft;
      context.fillText(track.name, 14, y + ROW / 2, LEFT - 18);
    });
    context.font = "600 12px system-ui, sans-serif";
    context.fillStyle = this.theme.text;
    for (const [y, process] of this.heads) {
      const at = this.top + y - this.scroll;
      if (at > this.top - HEAD && at < height) context.fillText(process, 6, at + HEAD / 2, LEFT - 8);
    }
  }

  // Slices wider than a pixel are drawn; the others of a pixel become one column, as dense as they cover it.
  paintTrack(track, y) {
    const { context, slices } = this;
    const perPixel = (this.to - this.from) / this.width;
    const alpha = context.globalAlpha;
    let place = slices.after(track, this.from);
    while (place < track.last && slices.start[place] < this.to) {
      const left = Math.max(LEFT, this.x(slices.start[place]));
      const right = Math.min(LEFT + this.width, this.x(slices.end[place]));
      context.fillStyle = this.colorOf(place);
      if (right - left >= 1) {
        context.globalAlpha = alpha;
        context.fillRect(left, y + 1, Math.max(1, right - left - (right - left > 3 ? 0.7 : 0)), ROW - 2);
        if (right - left > 34) this.paintLabel(place, left, right, y);
        place += 1;
        continue;
      }
      const pixel = Math.floor(left);
      const next = slices.after(track, this.time(pixel + 1));
      const behind = Math.max(place + 1, next);
      const covered = (slices.busy[behind] - slices.busy[place]) / perPixel;
      context.globalAlpha = alpha * Math.min(1, 0.25 + 0.75 * covered);
      context.fillRect(pixel, y + 1, 1, ROW - 2);
      place = behind;
    }
    context.globalAlpha = alpha;
  }

  paintLabel(place, left, right, y) {
    const { context, slices } = this;
    const group = slices.get("group", place);
    const text = group === undefined ? slices.get("title", place) : `${group}`;
    if (context.measureText(text).width > right - left - 6) return;
    context.fillStyle = context.fillStyle === COLORS.blue ? "#fff" : "#111";
    context.fillText(text, left + 3, y + ROW / 2);
  }

  paintFollowed() {
    const { context, slices } = this;
    const marked = new Set(this.followed);
    if (this.chosen >= 0) marked.add(this.chosen);
    for (const place of marked) {
      const track = slices.tracks[slices.trackOf(place)];
      const y = this.top + track.y - this.scroll;
      const left = Math.max(LEFT, this.x(slices.start[place]));
      const right = Math.max(left + 2, Math.min(LEFT + this.width, this.x(slices.end[place])));
      if (right < LEFT || left > LEFT + this.width) continue;
      context.fillStyle = this.colorOf(place);
      context.fillRect(left, y + 1, right - left, ROW - 2);
      context.strokeStyle = this.theme.text;
      context.lineWidth = place === this.chosen ? 2.5 : 1;
      context.strokeRect(left - 0.5, y + 0.5, right - left + 1, ROW - 1);
    }
    context.strokeStyle = this.theme.text;
    context.lineWidth = 1;
    for (const [source, target] of this.links || []) this.paintArrow(source, target);
  }

  paintArrow(source, target) {
    const { context, slices } = this;
    const ends = [[source, slices.end[source]], [target, slices.start[target]]].map(([place, time]) => {
      const track = slices.tracks[slices.trackOf(place)];
      return [this.x(time), this.top + track.y - this.scroll + ROW / 2];
    });
    const [[x0, y0], [x1, y1]] = ends;
    if (Math.max(x0, x1) < LEFT || Math.min(x0, x1) > LEFT + this.width) return;
    const bend = Math.max(12, Math.abs(x1 - x0) / 3);
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
    context.stroke();
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x1 - 6, y1 - 3.5);
    context.lineTo(x1 - 6, y1 + 3.5);
    context.closePath();
    context.fillStyle = this.theme.text;
    context.fill();
  }

  paintAxis(width) {
    const { context } = this;
    context.fillStyle = this.theme.back;
    context.fillRect(0, 0, width, this.top);
    const rough = (this.to - this.from) / Math.max(2, this.width / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (let time = Math.ceil(this.from / step) * step; time <= this.to; time += step) {
      const x = this.x(time);
      context.strokeStyle = this.theme.line;
      context.beginPath();
      context.moveTo(x, AXIS - 4);
      context.lineTo(x, this.top);
      context.stroke();
      context.fillStyle = this.theme.soft;
      const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step))));
      context.fillText(`${time.toFixed(digits)} s`, x + 3, AXIS / 2);
    }
  }

  // What the slots did, stacked: at the bottom busy slots, above them the causes of idleness.
  paintIdle() {
    const { context } = this;
    const { seconds: size, names, slots } = meta.idle;
    if (!size) return;
    const most = Math.max(1e-9, ...slots[0].map((_, bin) => slots.reduce((sum, row) => sum + row[bin], 0)));
    const [bottom, scale] = [this.top - 4, (IDLE - 10) / most];
    context.fillStyle = this.theme.soft;
    context.fillText("slots", 14, bottom - IDLE / 2);
    const first = Math.max(0, Math.floor(this.from / size));
    const last = Math.min(slots[0].length - 1, Math.floor(this.to / size));
    for (let bin = first; bin <= last; bin++) {
      let y = bottom;
      const left = Math.max(LEFT, this.x(bin * size));
      const right = Math.min(LEFT + this.width, this.x((bin + 1) * size));
      names.forEach((name, row) => {
        const height = slots[row][bin] * scale;
        context.fillStyle = this.slotColor(row);
        context.fillRect(left, y - height, right - left + 0.4, height);
        y -= height;
      });
    }
  }

  // input

  placeAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    if (x < LEFT || y < this.top) return [-1, x, y];
    const track = this.slices.tracks.find((one) => {
      const at = this.top + one.y - this.scroll;
      return y >= at && y < at + ROW;
    });
    if (!track) return [-1, x, y];
    return [this.slices.at(track, this.time(x), (3 * (this.to - this.from)) / this.width), x, y];
  }

  listen() {
    const canvas = this.canvas;
    let dragged = null;
    canvas.addEventListener("pointerdown", (event) => {
      dragged = { x: event.clientX, y: event.clientY, from: this.from, to: this.to, scroll: this.scroll, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!dragged) return this.hover(event);
      const by = event.clientX - dragged.x;
      dragged.moved ||= Math.abs(by) + Math.abs(event.clientY - dragged.y) > 3;
      const span = dragged.to - dragged.from;
      this.show(dragged.from - (by / this.width) * span, dragged.to - (by / this.width) * span);
      this.scroll = dragged.scroll - (event.clientY - dragged.y);
      this.tip.hidden = true;
    });
    canvas.addEventListener("pointerup", (event) => {
      if (dragged && !dragged.moved) this.click(event);
      dragged = null;
    });
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) {
        const box = canvas.getBoundingClientRect();
        this.zoom(Math.exp(event.deltaY / 300), this.time(Math.max(LEFT, event.clientX - box.left)));
      } else {
        this.scroll += event.deltaY;
        const by = (event.deltaX / this.width) * (this.to - this.from);
        this.show(this.from + by, this.to + by);
      }
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    for (const name of ["focus", "blur"]) canvas.addEventListener(name, () => this.draw());
    byId("in").addEventListener("click", () => this.zoom(0.5));
    byId("out").addEventListener("click", () => this.zoom(2));
    byId("fit").addEventListener("click", () => this.show(0, meta.end));
    byId("coloring").addEventListener("change", () => { this.draw(); this.legend(); });
    byId("group").addEventListener("change", (event) => {
      if (event.target.value !== "") this.follow(Number(event.target.value), true);
      else this.release();
    });
  }

  key(event) {
    const span = this.to - this.from;
    const moves = {
      ArrowLeft: () => this.show(this.from - span / 8, this.to - span / 8),
      ArrowRight: () => this.show(this.from + span / 8, this.to + span / 8),
      ArrowUp: () => this.move(-1), ArrowDown: () => this.move(1),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      Home: () => this.show(0, meta.end), n: () => this.step(1), p: () => this.step(-1),
      Enter: () => this.chosen >= 0 && this.follow(this.slices.get("group", this.chosen), false),
      Escape: () => this.release(),
    };
    const move = event.ctrlKey || event.metaKey || event.altKey ? undefined : moves[event.key];
    if (!move) return;
    event.preventDefault();
    move();
  }

  // Choose the next or previous slice of the chosen track.
  step(by) {
    const track = this.slices.tracks[this.track];
    const inside = this.chosen >= track.first && this.chosen < track.last;
    const next = inside ? this.chosen + by : this.slices.after(track, this.from);
    if (next >= track.first && next < track.last) this.choose(next, true);
  }

  move(by) {
    this.track = Math.max(0, Math.min(this.slices.tracks.length - 1, this.track + by));
    this.reveal(this.slices.tracks[this.track]);
    this.draw();
  }

  reveal(track) {
    const room = this.canvas.clientHeight - this.top;
    if (track.y < this.scroll) this.scroll = Math.max(0, track.y - HEAD);
    if (track.y + ROW > this.scroll + room) this.scroll = track.y + ROW - room;
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  show(from, to) {
    const least = Math.max(1e-6, meta.end / 1e7);
    const span = Math.max(least, Math.min(to - from, meta.end || 1));
    this.from = Math.max(0, Math.min(from, meta.end - span));
    this.to = this.from + span;
    this.draw();
  }

  hover(event) {
    const [place, x, y] = this.placeAt(event);
    const idle = y >= AXIS && y < this.top && x >= LEFT;
    this.tip.hidden = place < 0 && !idle;
    if (this.tip.hidden) return;
    const lines = place >= 0 ? this.linesOf(place) : this.idleAt(this.time(x));
    this.tip.replaceChildren(element("b", lines[0]), ...lines.slice(1).map((line) => element("div", line)));
    const room = this.canvas.clientWidth;
    this.tip.style.left = `${Math.min(x + 14, Math.max(0, room - this.tip.offsetWidth - 6))}px`;
    this.tip.style.top = `${Math.min(y + 14, this.canvas.clientHeight - this.tip.offsetHeight - 4)}px`;
  }

  linesOf(place) {
    const slices = this.slices;
    const times = `${slices.start[place].toFixed(3)} to ${slices.end[place].toFixed(3)} s: ${seconds(slices.end[place] - slices.start[place])}`;
    const names = ["outcome", "reason", "tokens", "version", "staleness", "step", "became", "groups"];
    const details = names.map((name) => [name, slices.get(name, place)]).filter(([, value]) => value !== undefined && value !== "");
    return [slices.get("title", place), times, ...details.map(([name, value]) => `${name}: ${value}`)];
  }

  idleAt(time) {
    const bin = Math.min(meta.idle.slots[0].length - 1, Math.floor(time / meta.idle.seconds));
    const lines = meta.idle.names.map((name, row) => [name, meta.idle.slots[row][bin]]).filter(([, value]) => value > 0.005);
    return [`slots near ${time.toFixed(2)} s`, ...lines.map(([name, value]) => `${name.replaceAll("_", " ")}: ${value.toFixed(1)}`)];
  }

  click(event) {
    const [place] = this.placeAt(event);
    if (place < 0) return this.release();
    this.choose(place, false);
    const group = this.slices.get("group", place);
    if (group !== undefined) this.follow(group, false);
  }

  release() {
    this.followed.clear();
    this.links = [];
    this.chosen = -1;
    byId("group").value = "";
    byId("details").replaceChildren(element("p", "Choose a slice to see its details and causes."));
    this.draw();
  }

  follow(group, choose) {
    if (group === undefined) return;
    const found = this.slices.ofGroup(group);
    if (!found.length) {
      byId("details").replaceChildren(element("p", `Group ${group} has no slice in this run.`));
      return;
    }
    byId("group").value = group;
    this.followed = new Set(found);
    this.links = [];
    for (const place of found) {
      const [causes, effects] = this.slices.linked(place);
      for (const cause of causes.slice(0, 20)) this.links.push([cause, place]);
      for (const effect of effects.slice(0, 20)) {
        this.links.push([place, effect]);
        if (this.slices.get("kind", effect) === "training") this.followed.add(effect);
      }
    }
    if (choose) this.choose(found[0], true);
    this.draw();
  }

  // Show the details of a slice, its causes and effects.
  choose(place, move) {
    const slices = this.slices;
    this.chosen = place;
    this.track = slices.trackOf(place);
    if (move) {
      this.reveal(slices.tracks[this.track]);
      const span = this.to - this.from;
      if (slices.end[place] < this.from || slices.start[place] > this.to) {
        this.show(slices.start[place] - span / 4, slices.start[place] + (3 * span) / 4);
      }
    }
    const track = slices.tracks[this.track];
    const details = element("dl");
    details.className = "details";
    const times = [["track", `${track.process}, ${track.name}`], ["start", `${slices.start[place].toFixed(3)} s`], ["duration", seconds(slices.end[place] - slices.start[place])]];
    for (const [name, value] of [...times, ...slices.details(place)]) {
      const pair = element("div");
      const shown = typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(4) : value;
      pair.append(element("dt", name), element("dd", String(shown)));
      details.append(pair);
    }
    const parts = [element("h3", slices.get("title", place)), details];
    slices.linked(place).forEach((places, way) => {
      if (places.length) parts.push(this.buttons(way ? "caused" : "caused by", places));
    });
    byId("details").replaceChildren(...parts);
    this.draw();
  }

  buttons(title, places) {
    const line = element("div", `${title}: `);
    line.className = "links";
    for (const place of places.slice(0, 12)) {
      const button = element("button", this.slices.get("title", place));
      button.type = "button";
      button.addEventListener("click", () => {
        this.choose(place, true);
        this.follow(this.slices.get("group", place), false);
      });
      line.append(button);
    }
    if (places.length > 12) line.append(element("span", `and ${places.length - 12} more`));
    return line;
  }

  legend() {
    const by = byId("coloring").value;
    const [columns, groups] = [this.slices.columns, []];
    const used = (name) => new Set(columns[name] ? Array.from(columns[name].values, (value) => meta.texts[value]) : []);
    const values = { became: BECAME, outcome: OUTCOMES }[by];
    if (values) {
      const known = used(by);
      for (const [name, color] of Object.entries(values)) if (known.has(name)) groups.push([name, COLORS[color]]);
    } else {
      const last = STEPS.length - 1;
      const name = (value) => (by === "version" ? `v ≡ ${value} mod 7` : value < last ? `${value}` : `${value} or more`);
      STEPS.forEach((color, value) => groups.push([name(value), color]));
      if (by === "staleness") groups.push(["not trained", COLORS.pale]);
    }
    const kinds = used("kind");
    const others = Object.entries(KINDS).filter(([name]) => kinds.has(name)).map(([name, color]) => [name, COLORS[color]]);
    const slots = meta.idle.names.map((name, row) => [`${row ? "idle: " : ""}${name.replaceAll("_", " ")}`, this.slotColor(row)]);
    const line = (title, entries) => {
      const made = element("div");
      made.append(element("b", title));
      for (const [name, color] of entries) {
        const entry = element("span", name);
        const dot = element("i");
        dot.style.background = color;
        entry.prepend(dot);
        made.append(entry);
      }
      return made;
    };
    byId("legend").replaceChildren(line("groups", groups), line("others", others), line("slots", slots));
  }

  slotColor(row) {
    return row ? COLORS[CAUSES[row % CAUSES.length]] : COLORS.green;
  }
}

// -- curves -----------------------------------------------------------------------------------------------------------

const plots = [];

// The axes of a plot: train steps in whole numbers, and room for the longest value.
function axesOf(axis) {
  const line = { stroke: style("--line"), width: 0.5 };
  const look = { stroke: style("--soft"), grid: line, ticks: line, labelSize: 18 };
  const whole = [...Array(8).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
  const longest = (values) => Math.max(0, ...(values ?? []).map((text) => text.length));
  return [
    axis === "step" ? { ...look, label: "step", incrs: whole } : { ...look, label: "s" },
    { ...look, size: (_, values) => Math.max(50, 20 + 7 * longest(values)) },
  ];
}

function drawCurves() {
  const axis = document.querySelector("input[name=axis]:checked").value;
  const box = byId("curves");
  plots.splice(0).forEach((plot) => plot.destroy());
  box.replaceChildren();
  const { curves } = meta;
  const x = axis === "step" ? curves.step : curves.wall;
  if (!x.length) return box.append(element("p", "No train step has finished."));
  const lines = [COLORS.blue, COLORS.red, COLORS.green, COLORS.orange, COLORS.pink];
  for (const { title, names, values } of curves.plots) {
    const card = element("div");
    card.className = "plot";
    card.append(element("h3", title));
    box.append(card);
    const series = [{ label: axis === "step" ? "step" : "s" }, ...names.map((name, place) => ({
      label: name.replaceAll("_", " "), stroke: lines[place % lines.length], width: 1.5, spanGaps: true,
      dash: [[], [6, 3], [2, 2], [8, 3, 2, 3]][place % 4],
      value: (_, value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(5)).toString()),
    }))];
    const data = [x, ...values];
    plots.push(new uPlot({
      width: card.clientWidth - 16, height: 210, scales: { x: { time: false } }, axes: axesOf(axis), series,
      cursor: { sync: { key: "curves" } },
    }, data, card));
  }
  for (const [name, { buckets, mean }] of Object.entries(curves.histograms)) {
    drawHistograms(name, buckets, mean, x, axis, box);
  }
  if (curves.validations.length) drawValidations(axis, lines, box);
}

// The rewards of each step: a column of buckets, the more responses the darker.
function drawHistograms(name, rows, mean, x, axis, box) {
  const card = element("div");
  card.className = "plot";
  card.append(element("h3", `${name.replaceAll("_", " ")}: responses by value`));
  box.append(card);
  const ends = rows.flatMap((row) => row.flatMap(([low, high]) => [low, high]));
  const low = ends.reduce((a, b) => Math.min(a, b)), high = ends.reduce((a, b) => Math.max(a, b));
  const margin = (high - low) * 0.05 || 0.5;
  const draw = (plot) => {
    const { ctx } = plot, pixels = devicePixelRatio || 1;
    const width = Math.max(1, Math.abs(plot.valToPos(x[1] ?? x[0], "x", true) - plot.valToPos(x[0], "x", true)));
    ctx.save();
    ctx.beginPath();
    ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
    ctx.clip();
    ctx.fillStyle = COLORS.blue;
    rows.forEach((row, place) => {
      const whole = row.reduce((sum, [, , count]) => sum + count, 0);
      const left = plot.valToPos(x[place], "x", true) - width / 2;
      for (const [from, to, count] of row) {
        const top = plot.valToPos(to, "y", true), height = plot.valToPos(from, "y", true) - top;
        const least = Math.max(height, 5 * pixels);
        ctx.globalAlpha = 0.1 + 0.9 * count / whole;
        ctx.fillRect(left, top - (least - height) / 2, width, least);
      }
    });
    ctx.restore();
  };
  plots.push(new uPlot({
    width: card.clientWidth - 16, height: 210,
    scales: { x: { time: false }, y: { range: [low - margin, high + margin] } },
    axes: axesOf(axis),
    series: [{ label: axis }, { label: "mean", stroke: COLORS.orange, width: 1 }],
    cursor: { sync: { key: "curves" } }, hooks: { drawAxes: [draw] },
  }, [x, mean], card));
}

function drawValidations(axis, lines, box) {
  const card = element("div");
  card.className = "plot";
  card.append(element("h3", "validation accuracy"));
  box.append(card);
  const column = axis === "step" ? 0 : 1;
  const found = [...meta.curves.validations].sort((a, b) => a[column] - b[column]);
  plots.push(new uPlot({
    width: card.clientWidth - 16, height: 210, scales: { x: { time: false } },
    axes: axesOf(axis),
    series: [{ label: axis }, ...["accuracy", "failed responses"].map((label, place) => (
      { label, stroke: lines[1 + place], width: 1.5, points: { show: true, size: 7 } }))],
  }, [column, 2, 3].map((place) => found.map((row) => row[place])), card));
}

// -- theme ------------------------------------------------------------------------------------------------------------

function useTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "light" : "dark";
}

useTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
unpack().then((columns) => {
  const view = new TimelineView(new Slices(columns));
  view.legend();
  view.draw();
  drawCurves();
  byId("theme").addEventListener("click", () => {
    useTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    view.draw();
    drawCurves();
  });
  for (const radio of document.querySelectorAll("input[name=axis]")) radio.addEventListener("change", drawCurves);
  let wide = 0;
  window.addEventListener("resize", () => {
    if (wide) cancelAnimationFrame(wide);
    wide = requestAnimationFrame(drawCurves);
  });
  document.documentElement.dataset.ready = "yes";
});
