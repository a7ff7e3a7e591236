// The table of requests: a row keeps its element as long as its request lives, and moves when that is admitted or
// retracted.

import { byId, el, set, write } from "./dom.js";

const MOVE = { duration: 320, easing: "cubic-bezier(.2, .7, .2, 1)" };
const SHOWN = 24; // of each kind; the rest is a number
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Rows {
  #rows = new Map(); // by id
  #scale = 64;
  #told = "";
  #kinds = { running: kind("running", "Running"), waiting: kind("waiting", "Waiting") };

  show(told) {
    const before = this.#places();
    const seen = new Set();
    this.#rescale(told.running, told.waiting);
    for (const name of ["running", "waiting"]) this.#list(name, told[name], told.left_out?.[name] ?? 0, seen);
    for (const [id, row] of this.#rows) {
      if (!seen.has(id)) {
        row.node.remove();
        this.#rows.delete(id);
      }
    }
    if (!still.matches) this.#move(before);
    this.#tell(told);
  }

  /** Changes of the counts alone, and politely: the table itself is not read out again and again. */
  #tell({ running, waiting }) {
    const now = `${running.length} running, ${waiting.length} waiting`;
    if (now === this.#told) return;
    this.#told = now;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => write(byId("rows-told"), now), 3000);
  }

  #list(name, list, left, seen) {
    const { body, title, none } = this.#kinds[name];
    const shown = list.slice(0, SHOWN);
    const hidden = left + list.length - shown.length;
    write(title, `${this.#kinds[name].name} ${list.length + left}${hidden ? `, ${hidden} of them not shown` : ""}`);
    none.hidden = shown.length > 0;
    let at = none;
    for (const told of shown) {
      seen.add(told.id);
      const row = this.#rows.get(told.id) ?? this.#make(told.id);
      row.show(told, name, this.#scale);
      if (row.node.parentNode !== body || at.nextSibling !== row.node) at.after(row.node);
      at = row.node;
    }
  }

  #make(id) {
    const row = new Row(id);
    this.#rows.set(id, row);
    return row;
  }

  /** All bars have one scale, so that they can be compared; it grows at once and shrinks when half of it is empty. */
  #rescale(running, waiting) {
    const longest = Math.max(
      32,
      ...running.map((row) => row.prompt_tokens + row.output_tokens),
      ...waiting.map((row) => row.prompt_tokens),
    );
    if (longest > this.#scale || longest < this.#scale / 3) this.#scale = Math.ceil(longest * 1.4);
  }

  #places() {
    return new Map([...this.#rows.values()].map(({ node }) => [node, node.offsetTop]));
  }

  #move(before) {
    for (const { node } of this.#rows.values()) {
      const from = before.get(node);
      if (from === undefined) node.animate([{ opacity: 0 }, { opacity: 1 }], MOVE);
      else if (from !== node.offsetTop)
        node.animate([{ transform: `translateY(${from - node.offsetTop}px)` }, { transform: "none" }], MOVE);
    }
  }
}

function kind(name, title) {
  const body = byId(name);
  const heading = el("th", { scope: "rowgroup", colspan: 7 }, title);
  const none = el("tr.none", {}, el("td", { colspan: 7 }, name === "running" ? "Nothing runs." : "Nobody waits."));
  body.append(el("tr.kind", {}, heading), none);
  return { body, name: title, title: heading, none };
}

class Row {
  #phase = el("span.phase");
  #parts = { cached: el("span.cached"), prompt: el("span.prompt"), output: el("span.output") };
  #cells = {
    prompt: el("td.number.less"),
    output: el("td.number"),
    pages: el("td.number.less"),
    age: el("td.number.less"),
  };

  constructor(id) {
    const bar = el("div.progress", { "aria-hidden": "true" }, ...Object.values(this.#parts));
    const { prompt, output, pages, age } = this.#cells;
    this.node = el(
      "tr.row",
      {},
      el("th", { scope: "row" }, id),
      el("td", {}, this.#phase),
      el("td.bar-cell", {}, bar),
      prompt,
      output,
      pages,
      age,
    );
  }

  show(told, kind, scale) {
    const waits = kind === "waiting";
    const phase = waits ? "waiting" : told.phase;
    write(this.#phase, waits && told.priority ? `waiting, priority ${told.priority}` : phase);
    this.#phase.dataset.phase = phase;
    set(this.node, { "data-id": told.id, class: waits ? "row waits" : "row" });
    const cached = told.cached_tokens ?? 0;
    const widths = { cached, prompt: told.prompt_tokens - cached, output: told.output_tokens ?? 0 };
    for (const [name, part] of Object.entries(this.#parts))
      part.style.width = `${Math.min(100, (100 * widths[name]) / scale)}%`;
    write(this.#cells.prompt, String(told.prompt_tokens));
    write(this.#cells.output, waits ? "" : `${told.output_tokens} / ${told.max_tokens}`);
    write(this.#cells.pages, waits ? "" : String(told.pages));
    write(this.#cells.age, told.age_s < 100 ? `${told.age_s.toFixed(1)} s` : `${Math.round(told.age_s)} s`);
  }
}
