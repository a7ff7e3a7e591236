// The live view of the engine: one snapshot after another of /engine/stream, drawn where something changed.

import { ask, events } from "./api.js";
import { byId, el, set, svg, write } from "./dom.js";
import { Rows } from "./rows.js";
import { Tree } from "./tree.js";

const KEPT = 80; // snapshots in the small curves
const AGAIN_MS = 2000;
const PAGES = [
  ["tree_locked", "tree, in use"],
  ["tree_unlocked", "tree, reusable"],
  ["private", "of one request"],
  ["quarantine", "quarantine"],
  ["free", "free"],
];

export class EngineView {
  #connection = null;
  #paused = false;
  #tiles = new Map();
  #legend = new Map();
  #rows = new Rows();
  #tree = new Tree();
  #curves = { rate: [], running: [] };

  constructor() {
    const tile = (id, title, of = "") => this.#tiles.set(id, makeTile(title, of));
    tile("rate", "Tokens a second");
    tile("rows", "Running rows");
    tile("ttft", "Time to first token", "p50");
    tile("itl", "Between tokens", "p50");
    tile("cache", "Cache hits");
    tile("retractions", "Retractions");
    byId("tiles").append(...[...this.#tiles.values()].map((one) => one.node));
    for (const [owner, name] of PAGES) {
      const part = el(`span.part.${owner}`);
      const count = el("b", {}, "0");
      this.#legend.set(owner, { part, count });
      byId("pages-bar").append(part);
      byId("pages-legend").append(el("li", {}, el(`i.${owner}`), `${name} `, count));
    }
    byId("engine-pause").addEventListener("click", () => this.#pause());
  }

  open() {
    if (!this.#paused) this.#connection ??= this.#connect();
  }

  close() {
    this.#connection?.abort();
    this.#connection = null;
  }

  #pause() {
    this.#paused = !this.#paused;
    const button = byId("engine-pause");
    button.setAttribute("aria-pressed", String(this.#paused));
    write(button, this.#paused ? "Go on" : "Pause");
    if (this.#paused) this.close();
    else this.open();
  }

  #connect() {
    const connection = new AbortController();
    this.#follow(connection.signal);
    return connection;
  }

  /** Until it is closed; a stream that breaks is asked for again. */
  async #follow(signal) {
    while (!signal.aborted) {
      try {
        const response = await ask("engine/stream", { signal });
        for await (const data of events(response)) {
          const told = JSON.parse(data);
          this.#notice(told.error ? `No news of the engine: ${told.error.message}` : "");
          this.#tellState(told.state);
          if (!told.error) this.#show(told);
        }
      } catch (error) {
        if (signal.aborted) return;
        this.#notice(
          error.status === 404 ? "This server does not show its engine." : `No news of the engine: ${error.message}`,
        );
        if (error.status === 401 || error.status === 404) return this.close();
      }
      await pause(AGAIN_MS, signal);
    }
  }

  #notice(text) {
    byId("engine-notice").hidden = text === "";
    write(byId("engine-notice"), text);
    byId("engine-body").classList.toggle("stale", text !== "");
  }

  #tellState(state) {
    write(byId("engine-state"), state);
    byId("engine-state").dataset.state = state;
  }

  #show(told) {
    byId("engine-body").hidden = false;
    write(byId("engine-steps"), `step ${count(told.steps)}`);
    this.#showTiles(told);
    this.#showPages(told.pages);
    this.#rows.show(told);
    this.#tree.show(told);
  }

  #showTiles(told) {
    const { prompt_tokens: prompt, hit_tokens: hit, evicted_pages: evicted } = told.cache;
    const running = told.running.length + (told.left_out?.running ?? 0);
    const waiting = told.waiting.length + (told.left_out?.waiting ?? 0);
    this.#tile(
      "rate",
      told.tokens_per_s < 1000 ? told.tokens_per_s.toFixed(1) : count(Math.round(told.tokens_per_s)),
      "",
      this.#curve("rate", told.tokens_per_s),
    );
    this.#tile(
      "rows",
      count(running),
      `${count(waiting)} waiting${told.slots ? ` · ${count(told.slots.total)} slots` : ""}`,
      this.#curve("running", running),
    );
    this.#tile("ttft", ms(told.ttft_ms.p50), percentiles(told.ttft_ms));
    this.#tile("itl", ms(told.itl_ms.p50), percentiles(told.itl_ms));
    this.#tile(
      "cache",
      prompt ? `${Math.round((100 * hit) / prompt)} %` : "–",
      `${count(hit)} of ${count(prompt)} tokens`,
    );
    this.#tile("retractions", count(told.retractions), `${count(evicted)} pages evicted`);
  }

  #tile(id, value, more, points = null) {
    const { value: big, more: small, line } = this.#tiles.get(id);
    write(big, value);
    write(small, more);
    if (points !== null) line.setAttribute("points", points);
    line.parentNode.toggleAttribute("hidden", points === null);
  }

  /** The points of a polyline in a box of 100 × 24; the newest is at the right end. */
  #curve(name, value) {
    const values = this.#curves[name];
    values.push(value);
    if (values.length > KEPT) values.shift();
    const top = Math.max(...values, 1);
    return values
      .map((one, at) => `${(100 * (KEPT - values.length + at + 1)) / KEPT},${(23 - (22 * one) / top).toFixed(1)}`)
      .join(" ");
  }

  #showPages(pages) {
    const told = [];
    for (const [owner, name] of PAGES) {
      const { part, count: number } = this.#legend.get(owner);
      part.style.flexGrow = pages[owner];
      part.classList.toggle("none", pages[owner] === 0);
      write(number, count(pages[owner]));
      told.push(`${name} ${pages[owner]}`);
    }
    set(byId("pages-bar"), { "aria-label": `Of ${pages.total} pages: ${told.join(", ")}` });
  }
}

/** of: what the large number is of many, such as the median. */
function makeTile(title, of) {
  const value = el("span");
  const more = el("div.more");
  const line = svg("polyline");
  const curve = svg(
    "svg",
    { viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true", hidden: true },
    line,
  );
  return {
    node: el("div.tile", {}, el("h3", {}, title), el("div.value", {}, value, " ", el("small", {}, of)), more, curve),
    value,
    more,
    line,
  };
}

const percentiles = ({ p90, p99 }) => `p90 ${ms(p90)} · p99 ${ms(p99)}`;
const count = (number) => number.toLocaleString("en");

function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return `${(value / 1000).toFixed(value < 10000 ? 2 : 1)} s`;
  return `${value.toFixed(value < 10 ? 1 : 0)} ms`;
}

function pause(time_ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, time_ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}
