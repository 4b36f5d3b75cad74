// All curves, by section, with a filter; what the registry knows beyond the usual ones comes last.

import { Chart } from "./plot.js";
import { h, replace, stored, store } from "./dom.js";
import { SECTIONS, chart, others } from "./specs.js";

export class Charts {
  constructor(page) {
    this.page = page;
    this.charts = new Map();
    this.filter = "";
    this.names = "";
    this.sections = h("div", {});
    const search = h("input", { type: "search", placeholder: "Filter curves", "aria-label": "Filter curves", oninput: () => {
      this.filter = search.value.trim().toLowerCase();
      this.arrange();
    } });
    const smoothing = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: page.smoothing(), "aria-label": "Smoothing", oninput: () => {
      page.setSmoothing(Number(smoothing.value));
      replace(amount, Number(smoothing.value).toFixed(2));
    } });
    const amount = h("output", {}, page.smoothing().toFixed(2));
    const axis = h("select", { "aria-label": "Horizontal axis", onchange: () => page.setAxis(axis.value) },
      [["step", "step"], ["elapsed", "seconds worked"], ["time", "wall clock"]].map(([value, text]) => h("option", { value }, text)));
    axis.value = page.axis();
    this.element = h("div", { class: "view" }, h("div", { class: "toolbar" }, search,
      h("label", {}, "smoothing", smoothing, amount), h("label", {}, "over", axis),
      h("button", { class: "button", type: "button", onclick: () => page.zoom(null) }, "Whole range")), this.sections);
  }

  update() {
    const names = (this.page.detail?.metrics ?? []).map((metric) => metric.name).join("\n");
    if (names === this.names) return;
    this.names = names;
    this.arrange();
  }

  arrange() {
    const metrics = this.page.detail?.metrics ?? [];
    const there = new Set(metrics.map((metric) => metric.name));
    const closed = new Set(stored("closed", []));
    const wanted = [...SECTIONS.map(([title, ids]) => [title, ids.map(chart).filter((spec) => spec.lines.some((line) => there.has(line.metric)))]),
      ...others(metrics).map(([title, specs]) => [`More: ${title}`, specs])];
    const used = new Set();
    const matches = (spec) => !this.filter || [spec.title, ...spec.lines.flatMap((line) => [line.metric, line.name])].some((text) => text.toLowerCase().includes(this.filter));
    replace(this.sections, wanted.map(([title, specs]) => {
      const shown = specs.filter(matches);
      if (!shown.length) return null;
      const open = this.filter || (!closed.has(title) && (!title.startsWith("More: ") || stored("opened", []).includes(title)));
      const grid = h("div", { class: "grid" });
      const show = () => { if (!grid.children.length) grid.append(...shown.map((spec) => this.chart(spec).element)); };
      if (open) show();
      shown.forEach((spec) => used.add(spec.id));
      return h("details", { class: "section", open: Boolean(open), ontoggle: (event) => {
        const isOpen = event.target.open;
        if (isOpen) show();
        if (this.filter) return;
        for (const [key, keep] of [["closed", !isOpen], ["opened", isOpen]]) {
          store(key, [...new Set([...stored(key, []).filter((name) => name !== title), ...(keep ? [title] : [])])]);
        }
      } }, h("summary", {}, title, h("span", { class: "count" }, shown.length)), grid);
    }));
    if (!this.sections.children.length) replace(this.sections, h("p", { class: "empty" }, metrics.length ? "No curve has that in its name." : "No step has been told yet."));
    for (const [id, item] of this.charts) if (!used.has(id)) { item.destroy(); this.charts.delete(id); }
  }

  chart(spec) {
    if (!this.charts.has(spec.id)) this.charts.set(spec.id, new Chart(spec, this.page));
    return this.charts.get(spec.id);
  }

  redraw() { for (const item of this.charts.values()) item.update(); }
  destroy() { for (const item of this.charts.values()) item.destroy(); }
}
