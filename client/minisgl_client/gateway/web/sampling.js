// The sampling controls: what is empty is not sent, so that the server's own default holds.

import { byId, el } from "./dom.js";

const FIELDS = [
  { name: "temperature", label: "Temperature", hint: "0: most likely only", step: 0.1, min: 0 },
  { name: "top_p", label: "Top p", hint: "probability kept", step: 0.05, min: 0, max: 1 },
  { name: "top_k", label: "Top k", hint: "tokens kept", step: 1 },
  { name: "min_p", label: "Min p", hint: "share of the best's", step: 0.05, min: 0, max: 1 },
  { name: "max_tokens", label: "Max tokens", hint: "of one answer", step: 1, min: 1 },
  { name: "seed", label: "Seed", hint: "repeats an answer", step: 1 },
];
const PENALTIES = [
  { name: "presence_penalty", label: "Presence", step: 0.1 },
  { name: "frequency_penalty", label: "Frequency", step: 0.1 },
  { name: "repetition_penalty", label: "Repetition", step: 0.05, min: 0 },
];

export class Sampling {
  #inputs = new Map();
  #system = el("textarea", { id: "s-system", rows: 3 });
  #stop = el("textarea", { id: "s-stop", rows: 2, spellcheck: "false" });

  constructor() {
    const rows = FIELDS.map((field) => this.#row(field));
    const system = labelled("s-system", "System message", null, this.#system);
    const stop = labelled("s-stop", "Stop strings", "one a line", this.#stop);
    const penalties = PENALTIES.map((field) => this.#row(field));
    const group = el("fieldset", {}, el("legend", {}, "Penalties"), el("div.threes", {}, ...penalties));
    byId("fields").append(system, el("div.pairs", {}, ...rows), group, stop);
    const button = byId("sampling-button");
    const show = (open) => {
      byId("sampling").hidden = !open;
      button.setAttribute("aria-expanded", String(open));
    };
    button.addEventListener("click", () => show(byId("sampling").hidden));
    byId("sampling-close").addEventListener("click", () => {
      show(false);
      button.focus();
    });
    byId("sampling").addEventListener("keydown", (event) => {
      if (event.key === "Escape") byId("sampling-close").click();
    });
    byId("sampling-reset").addEventListener("click", () => this.#reset());
    this.open = () => show(true);
    show(matchMedia("(min-width: 64rem)").matches);
  }

  /** The fields of a request. */
  fields() {
    const given = {};
    for (const [name, input] of this.#inputs) if (input.value.trim() !== "") given[name] = Number(input.value);
    const stop = this.#stop.value.split("\n").filter((line) => line !== "");
    if (stop.length) given.stop = stop;
    return given;
  }

  /** The system message, or "". */
  system() {
    return this.#system.value.trim();
  }

  /** Whether all numbers are numbers; else the first wrong field is shown. */
  check() {
    const wrong = [...this.#inputs.values()].find((input) => input.validity.badInput);
    if (wrong) this.#point(wrong);
    return !wrong;
  }

  /** Shows the field that the server refused, if it is one of these. */
  refused(param) {
    const name = param?.replace(/[.[].*/, "");
    const input = name === "stop" ? this.#stop : this.#inputs.get(name);
    if (input) this.#point(input);
  }

  #point(input) {
    this.open();
    input.setAttribute("aria-invalid", "true");
    input.focus();
  }

  #row({ name, label, hint, step, min, max }) {
    const input = el("input", {
      id: `s-${name}`,
      type: "number",
      step: "any",
      min,
      max,
      inputmode: "decimal",
      placeholder: "default",
    });
    if (step) stepping(input, step);
    input.addEventListener("input", () => input.removeAttribute("aria-invalid"));
    this.#inputs.set(name, input);
    return labelled(`s-${name}`, label, hint, input);
  }

  #reset() {
    for (const input of [...this.#inputs.values(), this.#system, this.#stop]) {
      input.value = "";
      input.removeAttribute("aria-invalid");
    }
    byId("told").textContent = "All sampling fields are empty";
  }
}

function labelled(id, label, hint, input) {
  const told = hint ? el("span.note", { id: `${id}-hint` }, hint) : null;
  if (told) input.setAttribute("aria-describedby", told.id);
  return el("div.field", {}, el("label", { for: id }, label), input, told);
}

/** The arrow keys go in useful steps, and any number may still be typed. */
function stepping(input, step) {
  input.addEventListener("keydown", (event) => {
    const way = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const low = input.min === "" ? -Infinity : Number(input.min);
    const high = input.max === "" ? Infinity : Number(input.max);
    const next = Math.min(high, Math.max(low, Number(input.value || 0) + way * step));
    input.value = String(Number(next.toFixed(4)));
    input.dispatchEvent(new Event("input"));
  });
}
