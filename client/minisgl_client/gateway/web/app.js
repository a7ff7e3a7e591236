// The page: its two views, the theme, the key, the model's name.

import { ask, askForKeysWith, isKeyUsable, keepKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, write } from "./dom.js";
import { EngineView } from "./engine.js";
import { Sampling } from "./sampling.js";

const THEMES = ["system", "light", "dark"];
const chat = new Chat(new Sampling());
const engine = new EngineView();

theme();
keys();
views();
model();

/** One view at a time, by the address: #chat or #engine. */
function views() {
  const show = () => {
    const name = location.hash === "#engine" ? "engine" : "chat";
    for (const one of ["chat", "engine"]) {
      byId(one).hidden = one !== name;
      if (one === name) byId(`to-${one}`).setAttribute("aria-current", "page");
      else byId(`to-${one}`).removeAttribute("aria-current");
    }
    document.title = name === "engine" ? "Engine · minisgl" : "minisgl";
    byId("skip").hidden = name !== "chat";
    if (name === "engine") engine.open();
    else engine.close();
    if (name === "chat") chat.shown();
  };
  addEventListener("hashchange", show);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden)
      engine.close(); // nobody looks
    else show();
  });
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault(); // #prompt is no view
    byId("prompt").focus();
  });
  show();
}

async function model() {
  try {
    const { data } = await (await ask("v1/models")).json();
    chat.model = data[0].id;
    write(byId("model"), data[0].id);
  } catch (error) {
    write(byId("model"), "no model");
    byId("told").textContent = error.message;
  }
}

function theme() {
  const button = byId("theme");
  const now = () => document.documentElement.dataset.theme ?? "system";
  const show = () => {
    write(button, { system: "◐", light: "☀", dark: "☾" }[now()]);
    button.setAttribute("aria-label", now() === "system" ? "Theme: as the system" : `Theme: ${now()}`);
    button.title = button.getAttribute("aria-label");
  };
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(now()) + 1) % THEMES.length];
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem("minisgl.theme", next);
    } catch {
      // it holds until the page is closed
    }
    show();
  });
  show();
}

/** The dialog opens when the server asks for a key, and by its button from then on. */
function keys() {
  const dialog = byId("key-dialog");
  const field = byId("key");
  let answer = () => {};
  const open = (problem) =>
    new Promise((resolve) => {
      answer = resolve;
      byId("key-button").hidden = false;
      field.value = "";
      tell(problem);
      dialog.showModal();
      field.focus();
    });
  const tell = (problem) => {
    byId("key-problem").textContent = problem;
    field.setAttribute("aria-invalid", String(problem !== ""));
  };
  askForKeysWith((wrong) => open(wrong ? "The server does not know this key." : ""));
  byId("key-button").addEventListener("click", () => open(""));
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = field.value.trim();
    if (!isKeyUsable(key)) return tell("A key is made of printable ASCII characters without blanks.");
    keepKey(key);
    dialog.close("used");
    if (!chat.model) model();
  });
  dialog.addEventListener("close", () => {
    field.value = "";
    answer(dialog.returnValue === "used");
    dialog.returnValue = "";
  });
}
