// Before the first paint: the theme that was chosen here. Without a choice it is the system's.
"use strict";
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("minisgl.theme");
  } catch {
    // a browser that keeps nothing
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
