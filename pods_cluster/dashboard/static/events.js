// Events and errors, and the run's configuration and summary.

import { get, runPath } from "./api.js";
import { clock, duration, h, number, replace } from "./dom.js";
import { guide } from "./health.js";

const PAGE = 100;

export class Events {
  constructor(page) {
    this.page = page;
    this.level = "all";
    this.rows = h("div", { class: "event-list" });
    const choose = h("select", { "aria-label": "Level", onchange: () => { this.level = choose.value; this.load(); } },
      [["all", "all events"], ["problems", "warnings and errors"], ["error", "errors"]].map(([value, text]) => h("option", { value }, text)));
    this.element = h("div", { class: "view" }, h("div", { class: "toolbar" }, choose), h("section", { class: "card" }, this.rows));
    this.load();
  }

  async load(before = null) {
    const run = this.page.run;
    const level = { all: null, problems: ["warning", "error"], error: ["error"] }[this.level];
    let found;
    try {
      found = await get(`${runPath(run)}/events`, { before, limit: PAGE, level });
    } catch (error) {
      replace(this.rows, h("p", { class: "empty" }, error.message));
      return;
    }
    if (run !== this.page.run) return;
    if (before === null) this.rows.replaceChildren();
    this.rows.querySelector(".older")?.remove();
    this.rows.append(...found.events.map(line));
    if (found.more) this.rows.append(h("button", { class: "button older", type: "button", onclick: () => this.load(found.events.at(-1).id) }, "Older ones"));
    if (!this.rows.children.length) replace(this.rows, h("p", { class: "empty" }, this.level === "all" ? "Nothing has been told yet." : "No such events."));
  }

  update(message) { if (message?.events?.length) this.load(); }
  redraw() {}
  destroy() {}
}

function line(event) {
  // what the sentence says already is not said again
  const fields = Object.entries(event.fields ?? {}).filter(([name, value]) => name !== "link" && !(typeof value === "string" && event.text.includes(value)));
  const rule = event.kind === "health" ? event.fields?.rule : null;
  return h("div", { class: `event ${event.level}` }, h("time", {}, clock(event.time), h("span", { class: "faint" }, duration(event.elapsed))),
    h("span", { class: "faint" }, event.step === null ? "" : `step ${event.step}`), h("span", { class: "kind" }, event.kind),
    h("span", { class: "text" }, event.text, rule && [" ", guide(`/docs/troubleshooting#${encodeURIComponent(rule)}`)], fields.length > 0 && h("span", { class: "faint mono" }, ` ${fields.map(([name, value]) => `${name}=${typeof value === "number" ? number(value, 4) : JSON.stringify(value)}`).join(" ")}`)));
}

export class Config {
  constructor(page) {
    this.page = page;
    this.text = h("pre", { class: "text config" }, "Loading …");
    this.summary = h("section", { class: "card", hidden: true });
    this.element = h("div", { class: "view" }, this.summary, h("section", { class: "card" }, h("h2", {}, "config.yaml",
      h("button", { class: "button small right", type: "button", onclick: () => navigator.clipboard?.writeText(this.text.textContent) }, "Copy")), this.text));
    this.load();
  }

  async load() {
    const run = this.page.run;
    try {
      const found = await get(`${runPath(run)}/config`);
      if (run === this.page.run) this.text.textContent = found.text || "This run has no config.yaml.";
    } catch (error) { this.text.textContent = error.message; }
    if (!this.page.detail?.has_summary || !this.summary.hidden) return;
    try {
      const found = await get(`${runPath(run)}/summary`);
      if (run !== this.page.run) return;
      this.summary.hidden = false;
      replace(this.summary, h("h2", {}, "Summary"), h("pre", { class: "text config" }, JSON.stringify(found.summary, null, 2)));
    } catch { /* a run that ended without a summary */ }
  }

  update() { if (this.summary.hidden && this.page.detail?.has_summary) this.load(); }
  redraw() {}
  destroy() {}
}
