// Arms: runs that differ in their seed alone are one. Accuracy or reward with its band, and how much sooner each arm is.

import { h, number, percent, replace, store, stored } from "./dom.js";
import { alpha, colors, library, plain } from "./plot.js";

const AXES = [["training-minutes", "training time (min)"], ["minutes", "wall clock (min)"], ["gpu-seconds", "GPU-seconds"],
  ["steps", "updates"], ["rollouts", "rollouts made"], ["tokens", "tokens sampled"]];
const METRICS = [["accuracy", "held-out accuracy"], ["reward", "reward"]];

export class ArmsCard {
  /** `changed()` is called when another axis or baseline is chosen. */
  constructor(page, changed) {
    this.page = page;
    this.axis = stored("arms-axis", AXES[0][0]);
    this.metric = stored("arms-metric", METRICS[0][0]);
    this.target = undefined;
    this.chosen = null;
    this.ready = false;
    const metric = h("select", { "aria-label": "Arms by", onchange: () => { this.metric = metric.value; store("arms-metric", this.metric); this.target = undefined; this.goal.value = ""; changed(); } },
      METRICS.map(([value, text]) => h("option", { value }, text)));
    metric.value = this.metric;
    this.goal = h("input", { type: "number", step: "any", "aria-label": "Target", placeholder: "99 % of best", size: 12, onchange: () => {
      const asked = this.goal.valueAsNumber;
      this.target = Number.isFinite(asked) ? asked / (this.metric === "accuracy" ? 100 : 1) : undefined;
      changed();
    } });
    this.unit = h("span", { class: "faint" });
    const axis = h("select", { "aria-label": "Arms over", onchange: () => { this.axis = axis.value; store("arms-axis", this.axis); changed(); } },
      AXES.map(([value, text]) => h("option", { value }, text)));
    axis.value = this.axis;
    this.select = h("select", { "aria-label": "Baseline", onchange: () => { this.chosen = this.select.value; changed(); } });
    this.plot = h("div", { class: "plot" });
    this.table = h("div", { class: "scroll" });
    this.notes = h("p", { class: "faint" });
    this.element = h("section", { class: "card arms", hidden: true }, h("h2", {}, "Arms"),
      h("div", { class: "toolbar" }, h("label", {}, metric), h("label", {}, "over", axis), h("label", {}, "baseline", this.select), h("label", {}, "target", this.goal, this.unit)), this.plot, this.table, this.notes);
  }

  /** The chosen baseline, if it is among the shown runs. */
  baseline(ids) { return ids.includes(this.chosen) ? this.chosen : undefined; }

  async draw(arms, runs) {
    const chosen = this.metric !== METRICS[0][0] || this.target !== undefined; // what was chosen can be chosen back
    this.element.hidden = runs.length < 2 || ((!arms || arms.curves.length < 2) && !chosen);
    if (this.element.hidden) return;
    replace(this.unit, this.metric === "accuracy" ? "%" : "");
    if (!arms || arms.curves.length < 2) {
      if (this.ready) window.Plotly.purge(this.plot);
      this.ready = false;
      replace(this.table);
      replace(this.notes, "These runs cannot be compared by that.");
      return;
    }
    const share = arms.metric.endsWith("accuracy");
    replace(this.select, arms.curves.map((curve) => h("option", { value: curve.label }, curve.label)));
    this.select.value = arms.baseline;
    this.rows(arms);
    const color = (label) => runs.find((run) => run.id === label)?.color;
    const Plotly = await library();
    const palette = colors();
    const traces = arms.curves.flatMap((curve) => {
      const base = { x: curve.x, type: "scatter", mode: "lines", hoverinfo: "skip", showlegend: false, line: { width: 0 } };
      const seeds = curve.runs.length > 1 ? ` (${curve.runs.length} seeds)` : "";
      return [{ ...base, y: curve.low }, { ...base, y: curve.high, fill: "tonexty", fillcolor: alpha(color(curve.label), 0.14) },
        { x: curve.x, y: curve.y, type: "scatter", mode: curve.x.length > 30 ? "lines" : "lines+markers", name: plain(curve.label + seeds),
          line: { width: 1.8, color: color(curve.label) }, marker: { size: 5 }, hovertemplate: `${plain(curve.label)} <b>%{y:${share ? ".1%" : ".3g"}}</b><extra></extra>` }];
    });
    const title = AXES.find(([value]) => value === arms.axis)[1];
    await Plotly.react(this.plot, traces, {
      height: 300, margin: { l: 46, r: 10, t: 8, b: 44 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
      font: { family: "system-ui, sans-serif", size: 11, color: palette.muted }, hovermode: "x unified", dragmode: false,
      hoverlabel: { bgcolor: palette.surface, bordercolor: palette.line, font: { color: palette.text, size: 12 } },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11, color: palette.text } },
      xaxis: { title: { text: title, font: { size: 11 } }, gridcolor: "transparent", linecolor: palette.line, zeroline: false, fixedrange: true },
      yaxis: { gridcolor: palette.grid, zeroline: false, fixedrange: true, tickformat: share ? ".0%" : "" },
    }, { displayModeBar: false, responsive: true });
    this.ready = true;
  }

  rows(arms) {
    const target = arms.speed_ups[0]?.target;
    const axes = AXES.filter(([value]) => arms.speed_ups.some((item) => item.axis === value));
    const others = arms.curves.filter((curve) => curve.label !== arms.baseline);
    replace(this.table, h("table", { class: "table sooner" },
      h("thead", {}, h("tr", {}, h("th", {}, `Times sooner than ${arms.baseline}${target === undefined ? "" : ` at ${arms.metric.endsWith("accuracy") ? percent(target, 1) : number(target)}`}`), axes.map(([, title]) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, others.map((curve) => h("tr", { "data-arm": curve.label }, h("th", { scope: "row" }, curve.label),
        axes.map(([value]) => sooner(arms.speed_ups.find((item) => item.arm === curve.label && item.axis === value))))))));
    const seeds = Math.max(...arms.speed_ups.map((item) => item.seeds), 0);
    const few = seeds < 2 ? "One seed: no interval. " : seeds < 5 ? `${seeds} seeds: a bootstrap over so few is too narrow. ` : "";
    const missing = [...new Set(Object.values(arms.left_out))].map((why) => ` Left out: ${why}.`);
    const goal = this.target === undefined ? "The target is 99 % of the baseline's best. " : "";
    const means = arms.metric.startsWith("eval/") ? "" : "Rewards are means over ten steps. ";
    replace(this.notes, few, goal, means, "Brackets are 95 % over seeds.", missing);
  }

  destroy() { if (this.ready) window.Plotly.purge(this.plot); }
}

function sooner(found) {
  if (!found) return h("td", { class: "faint" }, "–");
  if (found.value === null) return missed(found);
  const interval = found.low === null ? "" : ` [${number(found.low)}, ${found.high === null ? "∞" : number(found.high)}]`;
  return h("td", { title: `at ${number(found.arm_at)}, the baseline at ${number(found.baseline_at)}` }, number(found.value), h("span", { class: "faint" }, interval));
}

function missed(found) {
  if (found.at_least !== null) return h("td", { title: `at ${number(found.arm_at)}; the baseline never reached it` }, `> ${number(found.at_least)}`);
  if (found.at_most !== null) return h("td", { title: `the baseline at ${number(found.baseline_at)}; the arm never reached it` }, `< ${number(found.at_most)}`);
  return h("td", { class: "faint" }, found.arm_at === null ? "never reached" : "–");
}
