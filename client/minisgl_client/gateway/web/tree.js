// The radix tree, drawn as an icicle: to the right go the tokens, each leaf has a line, and a block is as high as all
// that begins with it. So a prefix that many share is one high block at the left.

import { byId, el, set, svg, write } from "./dom.js";

const MOST_LEAVES = 48;
const LINE = 18; // height of a leaf, in px
const GAP = 2;
const KINDS = [
  ["locked", "in use"],
  ["recent", "used within a minute"],
  ["idle", "not used for longer"],
];
const TABLE = 200;

export class Tree {
  #blocks = new Map(); // by id
  #drawn = "";

  constructor() {
    byId("tree-legend").append(...KINDS.map(([name, told]) => el("li", {}, el(`i.${name}`), told)));
    document.querySelector("details.nodes").addEventListener("toggle", () => (this.#drawn = ""));
  }

  show({ tree, left_out: left }) {
    const width = Math.max(280, byId("tree-scroll").clientWidth - 2);
    const now = JSON.stringify([width, tree]);
    if (now === this.#drawn) return;
    this.#drawn = now;
    const roots = grown(tree);
    const hidden = (left?.tree ?? 0) + lay(roots);
    this.#draw(roots, width);
    this.#tell(tree, hidden, left?.tree ?? 0);
    if (document.querySelector("details.nodes").open) this.#table(tree);
  }

  #draw(roots, width) {
    const placed = flat(roots).filter((node) => node.line !== null);
    const longest = Math.max(1, ...placed.map((node) => node.from + node.tokens));
    const lines = Math.max(0, ...placed.map((node) => node.line + node.lines));
    set(byId("tree"), { width, height: lines * LINE, viewBox: `0 0 ${width} ${Math.max(1, lines * LINE)}` });
    byId("tree-scroll").hidden = placed.length === 0;
    const seen = new Set();
    for (const node of placed) {
      seen.add(node.id);
      const block = this.#blocks.get(node.id) ?? this.#make(node.id);
      block.show(node, width / longest);
    }
    for (const [id, block] of this.#blocks) {
      if (!seen.has(id)) {
        block.node.remove();
        this.#blocks.delete(id);
      }
    }
  }

  #make(id) {
    const block = new Block();
    this.#blocks.set(id, block);
    byId("tree").append(block.node);
    return block;
  }

  #tell(tree, hidden, leftOut) {
    const tokens = tree.reduce((sum, node) => sum + node.tokens, 0);
    const parents = new Map();
    for (const node of tree) parents.set(node.parent, (parents.get(node.parent) ?? 0) + 1);
    const shared = tree.filter((node) => (parents.get(node.id) ?? 0) > 1 || node.locks > 1).length;
    const nodes = (tree.length + leftOut).toLocaleString("en");
    const told = `${nodes} nodes, ${tokens.toLocaleString("en")} tokens, ${shared} shared`;
    write(byId("tree-note"), tree.length === 0 ? "empty" : told + (hidden ? `; ${hidden} not drawn` : ""));
    set(byId("tree"), { "aria-label": `Radix tree: ${told}. The table below has the nodes.` });
  }

  #table(tree) {
    const rows = tree.slice(0, TABLE).map((node) => {
      const cells = [
        node.parent ?? "the root",
        node.tokens,
        node.locks,
        `${node.last_used_s.toFixed(1)} s ago`,
        node.text ?? "not shown",
      ];
      return el(
        "tr",
        {},
        el("th", { scope: "row" }, String(node.id)),
        ...cells.map((cell, at) => el(at && at < 4 ? "td.number" : "td", {}, String(cell))),
      );
    });
    byId("tree-nodes").replaceChildren(...rows);
  }
}

class Block {
  #rect = svg("rect", { rx: 3 });
  #label = svg("text");
  #title = svg("title");
  node = svg("g", {}, this.#rect, this.#label, this.#title);

  show(node, scale) {
    const [x, y] = [node.from * scale, node.line * LINE];
    const wide = Math.max(1, node.tokens * scale - GAP);
    const high = node.lines * LINE - GAP;
    const used = node.locks ? "in use" : `used ${node.last_used_s.toFixed(1)} s ago`;
    const kind = node.locks > 0 ? "locked" : node.last_used_s < 60 ? "recent" : "idle";
    set(this.node, { class: `${kind}${node.children.length > 1 || node.locks > 1 ? " shared" : ""}` });
    set(this.#rect, { x, y, width: wide, height: high });
    set(this.#label, { x: x + 6, y: y + high / 2 });
    write(this.#label, fitting(node, wide));
    write(this.#title, `${node.tokens} tokens, ${node.locks} locks, ${used}${node.text ? `: ${node.text}` : ""}`);
  }
}

/** The longest label that fits, by the width of its letters. */
function fitting({ tokens, locks, text }, wide) {
  const room = Math.floor((wide - 10) / 6.6);
  const number = locks > 1 ? `${tokens} ×${locks}` : `${tokens}`;
  const told = text ? `${number}  ${text.replace(/\s+/g, " ")}` : number;
  if (told.length <= room) return told;
  if (text && room > number.length + 6) return `${told.slice(0, room - 1)}…`;
  return number.length <= room ? number : "";
}

/** The roots, with their children in an order that does not change: by id. */
function grown(tree) {
  const nodes = new Map(tree.map((node) => [node.id, { ...node, children: [], line: null, lines: 0, from: 0 }]));
  const roots = [];
  for (const node of [...nodes.values()].sort((a, b) => a.id - b.id))
    (nodes.get(node.parent)?.children ?? roots).push(node);
  return roots;
}

/** Gives each node its line, its height in lines and its begin in tokens. Returns how many found no place. */
function lay(roots) {
  let line = 0;
  let without = 0;
  const lay = (node, from) => {
    if (line >= MOST_LEAVES) {
      without += 1;
      for (const child of node.children) lay(child, from);
      return;
    }
    node.from = from;
    node.line = line;
    for (const child of node.children) lay(child, from + node.tokens);
    if (node.line === line) line += 1; // a leaf
    node.lines = line - node.line;
  };
  for (const root of roots) lay(root, 0);
  return without;
}

const flat = (nodes) => nodes.flatMap((node) => [node, ...flat(node.children)]);
