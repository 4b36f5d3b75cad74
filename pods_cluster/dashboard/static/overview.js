// The first view: what a run is doing now.

import { Chart } from "./plot.js";
import { clock, duration, h, number, percent, replace, store, stored } from "./dom.js";
import { problems } from "./health.js";
import { Pipeline } from "./pipeline.js";
import { FATES, OVERVIEW, chart } from "./specs.js";

const LEADING = 2; // curves that a narrow page shows before it folds the rest
const narrow = matchMedia("(max-width: 760px)");

export class Overview {
  constructor(page) {
    this.page = page;
    this.pipeline = new Pipeline();
    this.tiles = h("section", { class: "tiles", "aria-label": "Now" });
    this.charts = OVERVIEW.map((id) => new Chart(chart(id), page));
    this.leading = h("section", { class: "grid leading" });
    this.rest = h("section", { class: "grid" });
    this.moreNumbers = h("button", { class: "button small more-numbers", type: "button", onclick: () => {
      replace(this.moreNumbers, this.tiles.classList.toggle("all") ? "Fewer numbers" : "More numbers");
    } }, "More numbers");
    this.problems = h("div", { hidden: true });
    this.workers = h("section", { class: "card" });
    this.events = h("section", { class: "card" });
    this.folds = [];
    this.element = h("div", { class: "view overview" }, this.tiles, this.problems,
      this.fold("Pipeline", "pipeline", this.pipeline.element), this.leading, this.fold("More curves", "curves", this.rest),
      this.fold("Workers and events", "workers", h("div", { class: "halves" }, this.workers, this.events)));
    this.follow = () => this.arrange();
    narrow.addEventListener("change", this.follow);
    this.arrange();
  }

  /** A part that a narrow page keeps folded until it is asked for; a wide one shows it whole. */
  fold(title, name, ...children) {
    const element = h("details", { class: `fold fold-${name}`, ontoggle: () => {
      if (narrow.matches) store("unfolded", [...stored("unfolded", []).filter((other) => other !== name), ...(element.open ? [name] : [])]);
    } }, h("summary", {}, title), children);
    this.folds.push([name, element]);
    return element;
  }

  arrange() {
    this.leading.append(...this.charts.slice(0, LEADING).map((item) => item.element));
    (narrow.matches ? this.rest : this.leading).append(...this.charts.slice(LEADING).map((item) => item.element));
    const unfolded = new Set(stored("unfolded", []));
    for (const [name, element] of this.folds) element.open = !narrow.matches || unfolded.has(name);
  }

  update() {
    const { detail, config, recent } = this.page;
    if (!detail) return;
    replace(this.tiles, tiles(detail), this.moreNumbers);
    const failed = problems(detail, eventLine);
    this.problems.hidden = failed === null;
    replace(this.problems, failed);
    this.pipeline.update(detail, config);
    replace(this.workers, h("h2", {}, "Workers"), workerTable(detail, config, this.page.liveStatus), fates(detail));
    replace(this.events, h("h2", {}, "Latest events", h("a", { class: "more", href: this.page.link({ view: "events" }) }, "all")),
      recent.length ? recent.slice(0, 8).map(eventLine) : h("p", { class: "faint" }, "Nothing has been told yet."));
  }

  redraw() { for (const item of this.charts) item.update(); }

  destroy() {
    narrow.removeEventListener("change", this.follow);
    for (const item of this.charts) item.destroy();
  }
}

function tiles(detail) {
  const { latest, rates, totals } = detail;
  const cumulative = latest["rollout_to_update_ratio/cumulative"];
  const now = rates.rollout_to_update_ratio ?? latest.rollout_to_update_ratio;
  const share = cumulative ? 100 / cumulative : 0;
  return [
    h("div", { class: "tile main", "data-tile": "ratio" },
      h("div", { class: "label" }, "Rollouts per trained rollout"),
      h("div", { class: "figures" },
        h("div", {}, h("b", { class: "big" }, number(now)), h("span", { class: "faint" }, "now")),
        h("div", {}, h("b", { class: "big second" }, number(cumulative)), h("span", { class: "faint" }, "over the run"))),
      h("div", { class: "ratio-bar", title: `${percent(share / 100, 1)} of the scored rollouts are trained on` },
        h("i", { style: { width: `${Math.min(share, 100)}%` } })),
      h("div", { class: "faint" }, totals["rollouts/scored"] !== undefined
        ? `${number(totals["rollouts/scored"])} scored ÷ ${number(totals["rollouts/trained"])} trained`
        : cumulative === undefined ? "" : `1 in ${number(cumulative)} scored rollouts is trained on`)),
    h("div", { class: "tile rates" }, h("div", { class: "label" }, "Rollouts per second"),
      h("dl", { class: "rows" }, funnel("generated", rates["rollouts/generated"], rates["rollouts/generated"], 3),
        funnel("selected", rates["rollouts/selected"], rates["rollouts/generated"], 1),
        funnel("trained", rates["rollouts/trained"], rates["rollouts/generated"], 2))),
    h("div", { class: "tile later" }, h("div", { class: "label" }, "Idle share"),
      h("dl", { class: "rows" }, funnel("generators", latest["generator/idle_share"], 1, 1, percent),
        funnel("learner", latest["learner/idle_share"], 1, 2, percent))),
    plainTile("Reward", number(latest.reward), latest["reward/kept"] === undefined ? "" : `kept ${number(latest["reward/kept"])}`),
    plainTile("Held-out accuracy", percent(latest["eval/greedy_accuracy"] ?? latest["eval/sampled_accuracy"], 1),
      latest["eval/sampled_accuracy"] === undefined ? "greedy" : `sampled ${percent(latest["eval/sampled_accuracy"], 1)}`),
    plainTile("Response length", number(latest["completions/mean_length"]),
      latest["completions/kept_mean_length"] === undefined ? "tokens" : `tokens · kept ${number(latest["completions/kept_mean_length"])}`, "later"),
    plainTile("Step", duration(latest["timing_s/step"]), latest["weights/sync_seconds"] === undefined ? ""
      : `weight sync ${duration(latest["weights/sync_seconds"])}`, "later"),
  ];
}

function plainTile(label, value, below, more = "") {
  return h("div", { class: `tile small ${more}` }, h("div", { class: "label" }, label), h("b", { class: "value" }, value), h("div", { class: "faint" }, below));
}

function funnel(label, value, whole, color, format = number) {
  const width = whole > 0 && value !== undefined ? Math.min(100, (100 * value) / whole) : 0;
  return [h("dt", {}, label), h("dd", {}, h("span", { class: "bar" }, h("i", { style: { width: `${width}%`, background: `var(--series-${color})` } })),
    h("b", {}, value === undefined ? "–" : format(value)))];
}

function workerTable(detail, config, live) {
  const { latest } = detail;
  if (live?.workers?.length) {
    return h("table", { class: "table" }, h("thead", {}, h("tr", {}, ["worker", "state", "node", "process"].map((name) => h("th", {}, name)))),
      h("tbody", {}, live.workers.map((worker) => h("tr", {}, h("td", { class: "mono" }, worker.name),
        h("td", {}, h("span", { class: `state ${worker.state}` }, worker.state), worker.detail && h("span", { class: "faint" }, ` ${worker.detail}`)),
        h("td", {}, worker.node ?? ""), h("td", {}, worker.pid ?? "")))));
  }
  const pool = (name, wanted, serving, text) => h("tr", {}, h("td", {}, name),
    h("td", {}, h("span", { class: `state ${detail.status !== "running" ? "ended" : serving < wanted ? "starting" : "alive"}` },
      detail.status === "silent" ? "silent" : detail.status !== "running" ? "ended" : serving < wanted ? `${number(serving)} of ${number(wanted)}` : number(serving ?? wanted))), h("td", {}, text));
  const failed = detail.worker_events.slice(-4).reverse();
  return [h("table", { class: "table" }, h("thead", {}, h("tr", {}, ["pool", "workers", "now"].map((name) => h("th", {}, name)))), h("tbody", {},
    pool("generators", latest["generator/target"] ?? config.generator?.workers, latest["generator/workers"],
      [config.generator?.engine, latest["generator/running"] === undefined ? null : `${number(latest["generator/running"])} decoding, ${number(latest["generator/waiting"])} waiting`].filter(Boolean).join(" · ")),
    pool("learner", latest["learner/target"] ?? config.learner?.workers, latest["learner/workers"] ?? config.learner?.workers,
      [config.learner ? `ZeRO ${config.learner.zero_stage}` : null, latest["learner/microbatches"] === undefined ? null : `${number(latest["learner/microbatches"])} micro-batches`].filter(Boolean).join(" · ")))),
  failed.length ? h("div", { class: "below" }, failed.map(eventLine)) : h("p", { class: "faint" }, "No worker has failed.")];
}

function fates(detail) {
  const counts = FATES.map((fate) => [fate, detail.totals[`groups/${fate}`] ?? 0]);
  const whole = counts.reduce((sum, [, count]) => sum + count, 0);
  if (!whole) return null;
  return [h("h3", {}, "Fates of groups"), h("div", { class: "fates", role: "img", "aria-label": "Fates of groups" }, counts.map(([fate, count], index) =>
    count > 0 && h("i", { title: `${fate}: ${count}`, style: { flex: String(count), background: `var(--series-${index + 1})` } }))),
  h("div", { class: "keys" }, counts.map(([fate, count], index) => h("span", { class: count ? "" : "faint" },
    h("i", { style: { background: `var(--series-${index + 1})` } }), `${fate.replaceAll("_", " ")} `, h("b", {}, number(count)))))];
}

export function eventLine(event) {
  return h("div", { class: `event ${event.level}` }, h("time", { title: clock(event.time) }, event.step === null || event.step === undefined ? "–" : `step ${event.step}`),
    h("span", { class: "kind" }, event.kind), h("span", { class: "text" }, event.text));
}
