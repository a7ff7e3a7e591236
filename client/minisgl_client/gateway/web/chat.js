// A chat: exchanges of a question and its answer, streamed, stoppable, asked again.

import { ApiError, ask, events, fromBody } from "./api.js";
import { byId, copy, el, write } from "./dom.js";
import { Markdown } from "./markdown.js";

const STARTERS = [
  "Name three rivers and one fact about each.",
  "Write a Python function that reverses a list.",
  "Explain a prefix cache to a child.",
];
const REASONS = { length: "cut at its length", stop: "", tool_calls: "calls a tool", content_filter: "filtered" };

export class Chat {
  model = "";
  #sampling;
  #exchanges = [];
  #running = null; // the AbortController of the answer that streams

  constructor(sampling) {
    this.#sampling = sampling;
    const prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("stop").addEventListener("click", () => this.#running?.abort());
    byId("new-chat").addEventListener("click", () => this.#clear());
    prompt.addEventListener("input", () => fit(prompt));
    prompt.addEventListener("keydown", (event) => {
      const sends =
        event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches;
      if (sends) {
        event.preventDefault();
        this.#send();
      }
    });
    byId("chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#running) this.#running.abort();
    });
    byId("starters").append(
      ...STARTERS.map((text) => el("button", { type: "button", onclick: () => this.#start(text) }, text)),
    );
  }

  /** The view is on the screen: what a keyboard writes belongs to the message. */
  shown() {
    if (document.activeElement === document.body && matchMedia("(pointer: fine)").matches) byId("prompt").focus();
  }

  #start(text) {
    byId("prompt").value = text;
    byId("prompt").focus();
    this.#send();
  }

  #send() {
    const prompt = byId("prompt");
    const text = prompt.value.trim();
    if (text === "" || this.#running || !this.#sampling.check()) return;
    prompt.value = "";
    fit(prompt);
    byId("welcome").hidden = true;
    const exchange = { question: text, answer: "" };
    byId("turns").append(el("article.turn.question", { "aria-label": "You" }, el("p", {}, text)));
    this.#exchanges.push(exchange);
    this.#answer(exchange);
  }

  #clear() {
    this.#running?.abort();
    this.#exchanges = [];
    byId("turns").replaceChildren();
    byId("welcome").hidden = false;
    byId("told").textContent = "A new chat";
    byId("prompt").focus();
  }

  /** What the model is shown: an exchange that brought no word is left out. */
  #messages(last) {
    const system = this.#sampling.system();
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const { question, answer } of this.#exchanges) {
      if (answer) messages.push({ role: "user", content: question }, { role: "assistant", content: answer });
    }
    return [...messages, { role: "user", content: last.question }];
  }

  async #answer(exchange) {
    const running = new AbortController();
    exchange.answer = "";
    const body = {
      ...this.#sampling.fields(),
      messages: this.#messages(exchange),
      stream: true,
      stream_options: { include_usage: true },
    };
    const view = new Answer(() => this.#again(exchange, view));
    this.#busy(running);
    try {
      const response = await ask("v1/chat/completions", { body, signal: running.signal });
      await view.read(response);
      view.finish();
    } catch (error) {
      if (running.signal.aborted) view.stopped();
      else this.#failed(view, error);
    } finally {
      exchange.answer = view.text;
      if (this.#running === running) this.#busy(null);
    }
  }

  #failed(view, error) {
    const told = error instanceof ApiError ? error.message : "The answer broke off.";
    view.failed(told);
    if (error instanceof ApiError) this.#sampling.refused(error.param);
  }

  #again(exchange, view) {
    if (this.#running || this.#exchanges.at(-1) !== exchange || !this.#sampling.check()) return;
    view.remove();
    byId("prompt").focus(); // its button is gone
    this.#answer(exchange);
  }

  #busy(running) {
    const focused = document.activeElement;
    const [send, stop] = [byId("send"), byId("stop")];
    this.#running = running;
    send.hidden = running !== null;
    stop.hidden = running === null;
    if (focused === send) stop.focus();
    if (focused === stop) byId("prompt").focus();
    byId("turns").setAttribute("aria-busy", String(running !== null)); // read out when it is whole
    byId("told").textContent = running ? "The model answers" : "";
  }
}

/** One answer on the screen. */
class Answer {
  text = "";
  #reasoning = "";
  #usage = null;
  #reason = null;
  #began = performance.now();
  #firstAt = null;
  #lastAt = null;
  #drawing = 0; // a timer
  #took = 0; // the last drawing, in ms
  #body = el("div.markdown");
  #thought = el("div.thought");
  #thoughts = el("details.reasoning", { hidden: true }, el("summary", {}, "Reasoning"), this.#thought);
  #facts = el("span.facts");
  #foot = el("footer", { hidden: true }, this.#facts);
  #node = el("article.turn.answer.streams", { "aria-label": "Model" }, this.#thoughts, this.#body, this.#foot);
  #markdown = new Markdown(this.#body);

  constructor(again) {
    const copying = el(
      "button.quiet",
      { type: "button", "aria-label": "Copy the answer", onclick: () => copy(this.text, copying) },
      "Copy",
    );
    this.#foot.append(copying, el("button.quiet.again", { type: "button", onclick: again }, "Ask again"));
    byId("turns").append(this.#node);
    toEnd();
  }

  /** Until the stream's end. Raises ApiError when it breaks. */
  async read(response) {
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw fromBody(503, chunk.error);
      this.#take(chunk);
    }
    throw new ApiError(0, "The answer broke off.");
  }

  #take(chunk) {
    this.#usage = chunk.usage ?? this.#usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning } = choice.delta;
    this.#reason = choice.finish_reason ?? this.#reason;
    if (!content && !reasoning) return;
    this.#lastAt = performance.now();
    this.#firstAt ??= this.#lastAt;
    this.text += content ?? "";
    this.#reasoning += reasoning ?? "";
    this.#drawing ||= setTimeout(() => this.#draw(), 16 + 4 * this.#took); // what costs much is drawn rarely
  }

  #draw() {
    const began = performance.now();
    const followed = atEnd();
    clearTimeout(this.#drawing);
    this.#drawing = 0;
    this.#markdown.show(this.text);
    this.#thoughts.hidden = this.#reasoning === "";
    write(this.#thought, this.#reasoning);
    if (followed) toEnd();
    this.#took = performance.now() - began;
  }

  finish() {
    this.#end([REASONS[this.#reason] ?? this.#reason]);
  }

  stopped() {
    this.#end(["stopped"]);
  }

  failed(message) {
    this.#end([]);
    this.#foot.before(el("p.problem", { role: "alert" }, message));
    toEnd();
  }

  remove() {
    this.#node.remove();
  }

  #end(told) {
    const followed = atEnd();
    this.#draw();
    this.#node.classList.remove("streams");
    this.#foot.hidden = false;
    write(this.#facts, [...this.#numbers(), ...told].filter(Boolean).join(" · "));
    if (followed) toEnd();
  }

  #numbers() {
    const told = [];
    if (this.#firstAt !== null) told.push(`first word after ${seconds(this.#firstAt - this.#began)}`);
    if (this.#usage) {
      const { completion_tokens: out, prompt_tokens: prompt, prompt_tokens_details: details } = this.#usage;
      const rate =
        out > 1 && this.#lastAt > this.#firstAt
          ? `, ${(((out - 1) * 1e3) / (this.#lastAt - this.#firstAt)).toFixed(1)} a second`
          : "";
      told.push(`${out} tokens${rate}`, `prompt ${prompt}, ${details?.cached_tokens ?? 0} cached`);
    }
    return told;
  }
}

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

function atEnd() {
  const { scrollTop, scrollHeight, clientHeight } = byId("scroller");
  return scrollHeight - scrollTop - clientHeight < 60;
}

function toEnd() {
  byId("scroller").scrollTop = byId("scroller").scrollHeight;
}

/** As high as its text, to a limit that the style sheet has. */
function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}
