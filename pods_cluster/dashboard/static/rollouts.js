// The browser of rollouts: whole groups, the kept ones marked. What a model wrote is text, whatever it looks like.

import { get, runPath } from "./api.js";
import { clock, h, number, replace } from "./dom.js";
import { alpha, colors, library } from "./plot.js";

const PAGE = 40;
const FATES = [["", "all groups"], ["trained", "trained"], ["dropped", "dropped"], ["no_signal", "dropped: no signal"],
  ["too_few_valid", "dropped: too few valid"], ["stale", "dropped: too old"], ["lost", "lost"]];
const DROPPED = ["no_signal", "too_few_valid", "stale", "lost", "cancelled"];
const fateName = (fate) => (fate ?? "trained").replaceAll("_", " ");
const fateBadge = (fate) => h("span", { class: `badge fate ${fate ?? "trained"}` }, fateName(fate));
const ORDERS = {
  index: ["as sampled", (a, b) => a.index - b.index],
  best: ["highest reward", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.index - b.index],
  worst: ["lowest reward", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity) || a.index - b.index],
  long: ["longest", (a, b) => b.length - a.length || a.index - b.index],
};

export class Rollouts {
  constructor(page) {
    this.page = page;
    this.items = [];
    this.more = false;
    this.chosen = page.place.group ?? null;
    this.order = "index";
    this.keptOnly = false;
    this.list = h("div", { class: "groups", role: "list" });
    this.filter = h("select", { class: "fate-filter", "aria-label": "Fate of the group", onchange: () => {
      page.place.fate = this.filter.value;
      this.chosen = this.group = page.place.group = null;
      this.load();
    } }, FATES.map(([value, text]) => h("option", { value }, text)));
    this.filter.value = page.place.fate ?? "";
    this.detail = h("div", { class: "group-detail" }, h("p", { class: "empty" }, "Loading …"));
    this.element = h("div", { class: "view rollouts" }, h("aside", { class: "card" }, h("h2", {}, "Sampled groups"), this.filter, this.list), this.detail);
    this.load();
  }

  async load(before = null) {
    const run = this.page.run;
    try {
      const fate = this.filter.value;
      const found = await get(`${runPath(run)}/samples`, { before, limit: PAGE, fate: fate === "dropped" ? DROPPED : fate || null });
      if (fate !== this.filter.value) return;
      if (run !== this.page.run) return;
      this.items = before === null ? found.samples : [...this.items, ...found.samples];
      this.more = found.more;
      this.total = found.total;
    } catch (error) {
      replace(this.detail, h("p", { class: "empty" }, error.message));
      return;
    }
    this.drawList();
    const shown = this.items.find((item) => !DROPPED.includes(item.fate)) ?? this.items[0]; // a group that was trained says more
    if (this.chosen === null && shown) this.open(shown.id);
    else if (this.chosen !== null && before === null && !this.group) this.open(this.chosen);
    if (!this.items.length) {
      replace(this.detail, h("p", { class: "empty" }, this.filter.value && this.total ? "No sampled group had this fate." : "No group has been sampled yet. `run.samples_every` sets how often whole groups are kept for reading."));
    }
  }

  drawList() {
    replace(this.list, this.items.map((item) => h("button", { type: "button", class: `group ${item.id === this.chosen ? "chosen" : ""}`, "data-group": item.id,
      onclick: () => { this.open(item.id); if (matchMedia("(max-width: 860px)").matches) this.detail.scrollIntoView({ behavior: "smooth" }); } },
    h("span", { class: "group-step" }, `step ${item.step}`), h("span", { class: "mono faint" }, item.group),
    h("span", { class: "group-meta" }, DROPPED.includes(item.fate) ? fateBadge(item.fate) : `kept ${item.kept} of ${item.rollouts}`, h("b", {}, number(item.reward_mean)))), ),
    this.more && h("button", { class: "button", type: "button", onclick: () => this.load(this.items.at(-1).id) }, this.filter.value ? "Older ones" : `Older ones (${this.total - this.items.length})`));
  }

  async open(id) {
    this.chosen = id;
    this.page.place.group = id;
    this.drawList();
    try {
      const group = await get(`${runPath(this.page.run)}/samples/${id}`);
      if (this.chosen !== id) return;
      this.group = group;
      this.draw();
    } catch (error) {
      replace(this.detail, h("p", { class: "empty" }, error.message));
    }
  }

  draw() {
    const group = this.group;
    const rows = group.rollouts.filter((row) => !this.keptOnly || row.kept).sort(ORDERS[this.order][1]);
    const kept = group.rollouts.filter((row) => row.kept).length;
    const order = h("select", { "aria-label": "Order", onchange: () => { this.order = order.value; this.draw(); } },
      Object.entries(ORDERS).map(([value, [text]]) => h("option", { value }, text)));
    order.value = this.order;
    this.plot = h("div", { class: "plot short" });
    replace(this.detail,
      h("section", { class: "card" },
        h("h2", {}, `Step ${group.step}`, h("span", { class: "faint mono" }, ` group ${group.group}`), h("span", { class: "faint right" }, clock(group.time))),
        h("p", { class: "why" }, fateBadge(group.fate), h("span", { class: kept ? "badge kept" : "badge" }, `kept ${kept} of ${group.rollouts.length}`), group.rule && h("span", { class: "badge" }, group.rule),
          h("span", { class: "faint" }, group.reason)),
        h("h3", {}, "Prompt"), h("pre", { class: "text prompt" }, group.prompt),
        group.answer !== null && [h("h3", {}, "Reference answer"), h("pre", { class: "text" }, group.answer)]),
      h("section", { class: "card" }, h("h2", {}, "Rewards in the group"), this.plot, strip(group, (index) => this.show(index))),
      h("div", { class: "toolbar" }, h("label", {}, "order", order),
        h("label", {}, h("input", { type: "checkbox", checked: this.keptOnly, onchange: (event) => { this.keptOnly = event.target.checked; this.draw(); } }), "kept only"),
        h("span", { class: "faint" }, `${rows.length} completions`)),
      h("div", { class: "completions" }, rows.map(completion)));
    this.drawRewards();
  }

  async drawRewards() {
    const { plot, group } = this;
    if (group.rollouts.every((row) => row.reward === null)) {
      plot.className = "faint";
      replace(plot, "No rollout of this group has a reward.");
      return;
    }
    const rewards = (kept) => group.rollouts.filter((row) => row.kept === kept && row.reward !== null).map((row) => row.reward);
    const palette = colors();
    const Plotly = await library();
    if (plot !== this.plot) return;
    const { centers, counts, width } = histogram([rewards(true), rewards(false)]);
    const bars = (index, name, color) => ({ type: "bar", x: centers, y: counts[index], width, name, marker: { color },
      hovertemplate: `%{y} ${name} near %{x:.4~g}<extra></extra>` });
    await Plotly.react(plot, [bars(0, "kept", palette.series[0]), bars(1, "left out", alpha(palette.series[7], 0.5))], {
      barmode: "stack", height: 170, margin: { l: 34, r: 8, t: 4, b: 30 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
      font: { family: "system-ui, sans-serif", size: 11, color: palette.muted }, dragmode: false,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", font: { color: palette.text } },
      xaxis: { title: { text: "reward", standoff: 4 }, gridcolor: "transparent", linecolor: palette.line, fixedrange: true, zeroline: false },
      yaxis: { gridcolor: palette.grid, fixedrange: true, zeroline: false, nticks: 4, tickformat: "d" },
    }, { displayModeBar: false, responsive: true });
  }

  show(index) {
    const card = this.detail.querySelector(`[data-rollout="${Number(index)}"]`);
    card?.scrollIntoView({ behavior: "smooth", block: "center" });
    card?.classList.add("found");
    setTimeout(() => card?.classList.remove("found"), 1500);
  }

  update() {
    const known = this.page.detail?.samples ?? 0;
    if (this.total !== undefined && known !== this.total && !this.loading) {
      this.loading = true;
      this.load().finally(() => { this.loading = false; });
    }
  }

  redraw() {}
  recolor() { if (this.group) this.drawRewards(); }
  destroy() { if (this.plot?.data) window.Plotly.purge(this.plot); }
}

/** Counts of several lists in shared bins, whose centres take in the lowest and the highest value. */
function histogram(lists, bins = 20) {
  const all = lists.flat();
  const low = Math.min(0, ...all);
  const step = (Math.max(...all, low) - low) / bins || 1 / bins;
  const centers = Array.from({ length: bins + 1 }, (_, index) => low + index * step);
  const counts = lists.map((list) => {
    const count = new Array(bins + 1).fill(0);
    for (const value of list) count[Math.min(bins, Math.round((value - low) / step))] += 1;
    return count;
  });
  return { centers, counts, width: step * 0.88 };
}

/** All rollouts in rising reward: a square each, filled where kept. */
function strip(group, show) {
  const rows = [...group.rollouts].sort(ORDERS.worst[1]);
  return h("div", { class: "strip", role: "list", "aria-label": "Rollouts in rising reward" }, rows.map((row) => h("button", {
    type: "button", class: row.kept ? "kept" : "", title: `rollout ${row.index}: ${number(row.reward)}${row.kept ? ", kept" : ""}`,
    "aria-label": `rollout ${row.index}, reward ${number(row.reward)}${row.kept ? ", kept" : ""}`, onclick: () => show(row.index),
  }, row.index)));
}

function completion(row) {
  const parts = Object.entries(row.parts);
  const text = h("pre", { class: "text" }, row.text);
  const long = row.text.length > 1200 || row.text.split("\n").length > 14;
  if (long) text.classList.add("cut");
  return h("article", { class: `completion ${row.kept ? "kept" : ""}`, "data-rollout": row.index },
    h("header", {}, h("b", {}, `#${row.index}`), row.kept ? h("span", { class: "badge kept" }, "kept") : h("span", { class: "badge" }, "left out"),
      h("span", { class: "reward" }, "reward ", h("b", {}, number(row.reward))),
      (parts.length > 1 || (parts[0] && parts[0][1] !== row.reward)) && parts.map(([name, value]) => h("span", { class: "badge" }, `${name} ${number(value)}`)),
      h("span", { class: "faint right" }, `${number(row.length)} tokens · ${row.finish_reason} · v${row.versions[0] ?? "?"}${row.versions[1] !== row.versions[0] ? `–${row.versions[1]}` : ""}`)),
    row.errors.length > 0 && h("pre", { class: "text failed" }, row.errors.join("\n")), text, long && h("button", { class: "button small", type: "button", onclick: (event) => {
      const cut = text.classList.toggle("cut");
      event.target.textContent = cut ? "Show all" : "Show less";
    } }, "Show all"));
}
