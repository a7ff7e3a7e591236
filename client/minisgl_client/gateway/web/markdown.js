// Markdown of a model, as elements. marked reads it (its tokens only, never its HTML); HTML in it is shown as the text it is.

import { Lexer } from "./marked.esm.js";
import { copy, el } from "./dom.js";

const LINKS = ["http:", "https:", "mailto:"];
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

/** Shows a text that grows: blocks that did not change since the last call stay, and with them a selection. */
export class Markdown {
  #node;
  #raws = [];

  constructor(node) {
    this.#node = node;
  }

  show(text) {
    let tokens;
    try {
      tokens = Lexer.lex(text, { gfm: true }).filter((token) => token.type !== "space" && token.type !== "def");
      this.#update(tokens);
    } catch {
      this.#node.replaceChildren(el("p.raw", {}, text)); // nested deeper than the stack
      this.#raws = [];
    }
  }

  #update(tokens) {
    let same = 0;
    while (same < this.#raws.length && this.#raws[same] === tokens[same]?.raw) same++;
    const old = this.#node.children[same];
    const grows = tokens[same]?.type === "code" && old?.matches("figure") && old.dataset.lang === langOf(tokens[same]);
    if (grows) old.querySelector("code").textContent = tokens[same++].text;
    while (this.#node.children.length > same) this.#node.lastChild.remove();
    for (const token of tokens.slice(same)) this.#node.append(block(token));
    this.#raws = tokens.map((token) => token.raw);
  }
}

function block(token) {
  switch (token.type) {
    case "heading":
      return el(`h${Math.min(token.depth + 2, 6)}`, {}, ...inlines(token.tokens));
    case "paragraph":
      return el("p", {}, ...inlines(token.tokens));
    case "code":
      return code(token);
    case "blockquote":
      return el("blockquote", {}, ...blocks(token.tokens));
    case "list":
      return list(token);
    case "table":
      return table(token);
    case "hr":
      return el("hr");
    default: // HTML, and what a later marked may know
      return el("p.raw", {}, ...("tokens" in token && token.type === "text" ? inlines(token.tokens) : [token.raw]));
  }
}

const blocks = (tokens) => tokens.filter((token) => token.type !== "space" && token.type !== "def").map(block);

function code(token) {
  const lang = langOf(token);
  const text = el("code", {}, token.text);
  const button = el(
    "button.quiet",
    { type: "button", "aria-label": `Copy the code${lang ? ` (${lang})` : ""}` },
    "Copy",
  );
  button.addEventListener("click", () => copy(text.textContent, button));
  const pre = el("pre", { tabindex: "0" }, text);
  return el("figure", { "data-lang": lang }, el("figcaption", {}, el("span", {}, lang || "text"), button), pre);
}

const langOf = (token) => (token.lang ?? "").trim().split(/\s/)[0].slice(0, 24);

function list(token) {
  const items = token.items.map((item) => {
    const tick = item.task ? [item.checked ? "☑ " : "☐ "] : [];
    const inner = item.tokens.filter((one) => one.type !== "checkbox");
    return el("li", {}, ...tick, ...inner.flatMap((one) => (one.type === "text" ? textOf(one) : blocks([one]))));
  });
  const start = token.ordered && token.start > 1 ? { start: token.start } : {};
  return el(token.ordered ? "ol" : "ul", start, ...items);
}

function table(token) {
  const cell = (tag, { tokens, align }) => el(align ? `${tag}.${align}` : tag, {}, ...inlines(tokens));
  const head = el("tr", {}, ...token.header.map((one) => cell("th", one)));
  const rows = token.rows.map((row) => el("tr", {}, ...row.map((one) => cell("td", one))));
  const whole = el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows));
  return el("div.wide", { tabindex: "0", role: "group", "aria-label": "Table" }, whole);
}

const inlines = (tokens = []) => tokens.flatMap(inline);

function inline(token) {
  switch (token.type) {
    case "strong":
      return [el("strong", {}, ...inlines(token.tokens))];
    case "em":
      return [el("em", {}, ...inlines(token.tokens))];
    case "del":
      return [el("del", {}, ...inlines(token.tokens))];
    case "codespan":
      return [el("code", {}, token.text)];
    case "br":
      return [el("br")];
    case "link":
      return link(token.href, inlines(token.tokens));
    case "image": // nothing is loaded from elsewhere
      return link(token.href, [token.text || token.href]);
    case "text":
      return textOf(token);
    case "escape":
      return [token.text];
    default:
      return [token.raw];
  }
}

const textOf = (token) => (token.tokens ? inlines(token.tokens) : [decoded(token.text)]);

function link(href, children) {
  let url;
  try {
    url = new URL(href);
  } catch {
    return children; // relative to nothing we know
  }
  if (!LINKS.includes(url.protocol)) return children;
  return [
    el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, ...children),
  ];
}

function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-z]{2,4}));/g, (whole, decimal, hex, name) => {
    if (name) return ENTITIES[name] ?? whole;
    const point = decimal ? parseInt(decimal, 10) : parseInt(hex, 16);
    return point > 0 && point <= 0x10ffff ? String.fromCodePoint(point) : whole;
  });
}
