// Runs before the page is painted, so that a chosen theme does not flash.
"use strict";
try {
  const chosen = localStorage.getItem("pods.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // no storage: the system's theme it is
}
