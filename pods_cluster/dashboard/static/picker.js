// Which runs are looked at, and how far the first one is.

import { ago, duration, h, number, replace } from "./dom.js";

export function status(name) {
  return h("span", { class: `pill ${name}` }, name);
}

/** The list of runs: a click shows one, its box lays its curves over the shown one's. */
export function picker(element, page) {
  if (element.contains(document.activeElement) && element.querySelector("details")?.open && element.dataset.keep === key(page)) return;
  const wasOpen = element.querySelector("details")?.open ?? false;
  element.dataset.keep = key(page);
  const colors = new Map(page.runs().map((run) => [run.id, run.color]));
  const dot = (id) => h("i", { class: "dot", style: { background: colors.get(id) ?? "transparent" } });
  if (page.run === null) { element.replaceChildren(); return; }
  const row = (run) => h("li", { class: run.id === page.run ? "current" : "" },
    h("input", { type: "checkbox", checked: colors.has(run.id), disabled: run.id === page.run, "aria-label": `compare ${run.id}`, title: "Lay its curves over", onchange: (event) => {
      const others = page.compared.filter((id) => id !== run.id);
      page.go({ with: (event.target.checked ? [...others, run.id] : others).join(",") });
    } }),
    h("a", { href: page.link({ run: run.id, with: page.compared.filter((id) => id !== run.id).join(",") }), onclick: () => { element.querySelector("details").open = false; } },
      dot(run.id), h("span", { class: "name" }, run.id), status(run.status),
      h("span", { class: "faint" }, run.step === null ? "no step yet" : `step ${number(run.step)}${run.steps ? ` of ${number(run.steps)}` : ""}`),
      h("span", { class: "faint" }, ago(run.updated))));
  const current = page.detail?.status ?? page.runList.find((run) => run.id === page.run)?.status ?? "silent";
  replace(element,
    h("details", { open: wasOpen }, h("summary", { title: page.detail?.status_text }, page.compared.length ? dot(page.run) : null, h("span", { class: "name" }, page.run), status(current)),
      h("div", { class: "panel" }, h("p", { class: "faint" }, "Tick runs to lay their curves over this one's, and to put them side by side under ", h("a", { class: "inline", href: page.link({ view: "compare" }) }, "Compare"), "."), h("ul", {}, page.runList.map(row)))),
    page.compared.map((id) => h("span", { class: "chip" }, dot(id), h("span", { class: "name" }, id),
      h("button", { type: "button", "aria-label": `take ${id} away`, onclick: () => page.go({ with: page.compared.filter((other) => other !== id).join(",") }) }, "×"))));
}

const key = (page) => JSON.stringify([page.run, page.compared, page.runList.map((run) => [run.id, run.status])]);

export function progress(element, page) {
  const { detail } = page;
  if (!detail) { element.replaceChildren(); return; }
  const share = detail.steps && detail.step !== null ? Math.min(detail.step / detail.steps, 1) : null;
  const speed = detail.latest["timing_s/step"];
  const left = share !== null && share < 1 && speed && detail.status === "running" ? (detail.steps - detail.step) * speed : null;
  replace(element,
    h("div", { class: "progress-text" }, h("b", { "data-step": detail.step ?? "" }, `step ${detail.step === null ? "–" : number(detail.step)}`), detail.steps && h("span", { class: "faint" }, ` of ${number(detail.steps)}`),
      h("span", { class: "faint" }, ` · ${duration(detail.elapsed)}`), left !== null && h("span", { class: "faint left" }, ` · ${duration(left)} left`),
      h("span", { class: "faint" }, ` · ${ago(detail.updated)}`)),
    share !== null && h("div", { class: "meter" }, h("i", { style: { width: `${share * 100}%` } })));
}

document.addEventListener("click", (event) => {
  const open = document.querySelector("#picker details[open]");
  if (open && !open.contains(event.target) && event.target.isConnected) open.open = false;
});
