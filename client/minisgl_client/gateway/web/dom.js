// Elements, made without any HTML text: what a model or a server wrote only ever becomes a text node.

/** `el("p.note", { id: "x", onclick }, "text", child)`. Properties: attributes, and listeners that begin with "on". */
export function el(name, properties = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  set(node, properties);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** The same of SVG. */
export function svg(tag, properties = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(node, properties);
  node.append(...children);
  return node;
}

export function set(node, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
}

export const byId = (id) => document.getElementById(id);

/** Writes a text only where it changed: what is the same is not announced and not laid out again. */
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** To the clipboard; the button tells how it went. Where a page is not served safely, there is only the old way. */
export async function copy(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = copiedTheOldWay(text);
  }
  const name = button.dataset.name ?? (button.dataset.name = button.textContent);
  button.textContent = done ? "Copied" : "Not copied";
  byId("told").textContent = done ? "Copied" : "The browser did not let it be copied";
  setTimeout(() => (button.textContent = name), 1500);
}

function copiedTheOldWay(text) {
  const before = document.activeElement;
  const area = el("textarea.unseen", { "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  try {
    return document.execCommand("copy");
  } catch {
    return false;
  } finally {
    area.remove();
    before?.focus();
  }
}
