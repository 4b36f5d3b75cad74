// Runs side by side: what each came to, the settings in which they differ, and how much sooner one arm is than another.

import { get } from "./api.js";
import { ArmsCard } from "./arms.js";
import { duration, h, number, percent, replace, throttle } from "./dom.js";
import { status } from "./picker.js";

const share = (value) => (value === null ? "–" : percent(value, 1));
const seconds = (value) => (value === null ? "–" : duration(value));
const HIGHER = (a, b) => a > b;
const FIGURES = [
  ["Held-out accuracy, best", (run) => share(run.accuracy_best), "accuracy_best", HIGHER, (run) => run.accuracy_best_step !== null && `step ${number(run.accuracy_best_step)}`],
  ["Held-out accuracy, final", (run) => share(run.accuracy_final), "accuracy_final", HIGHER],
  ["Reward, best ten steps", (run) => number(run.reward_best), "reward_best", HIGHER],
  ["Reward, last ten steps", (run) => number(run.reward_final), "reward_final", HIGHER],
  ["Steps", (run) => number(run.step)],
  ["Time worked", (run) => seconds(run.seconds)],
  ["GPU-seconds", (run) => number(run.gpu_seconds, 4)],
  ["Rollouts per trained rollout", (run) => number(run.ratio)],
  ["Rollouts scored", (run) => number(run.rollouts_scored, 4)],
  ["Rollouts trained", (run) => number(run.rollouts_trained, 4)],
  ["Tokens sampled", (run) => number(run.tokens_sampled, 4)],
];

export class Compare {
  constructor(page) {
    this.page = page;
    this.table = h("div", { class: "scroll" }, h("p", { class: "empty" }, "Loading …"));
    this.hint = h("p", { class: "faint" });
    this.arms = new ArmsCard(page, () => this.load());
    this.element = h("div", { class: "view" }, this.arms.element, h("section", { class: "card" }, h("h2", {}, "Runs side by side"), this.hint, this.table));
    this.again = throttle(() => this.load(), 5000);
    this.load();
  }

  async load() {
    const runs = this.page.runs();
    const ids = runs.map((run) => run.id);
    let found;
    try {
      found = await get("/api/compare", { run: ids, x: this.arms.axis, y: this.arms.metric, baseline: this.arms.baseline(ids), target: this.arms.target });
    } catch (error) {
      replace(this.table, h("p", { class: "empty" }, error.message));
      return;
    }
    if (ids.join() !== this.page.runs().map((run) => run.id).join()) return;
    replace(this.hint, ids.length > 1 ? "" : "Tick other runs in the list at the top to put them beside this one.");
    this.draw(found, runs);
    this.arms.draw(found.arms, runs);
  }

  draw({ figures, settings }, runs) {
    const best = (name, better) => figures.reduce((held, run) => (run[name] !== null && (held === null || better(run[name], held)) ? run[name] : held), null);
    const several = figures.length > 1;
    replace(this.table, h("table", { class: "table compare" },
      h("thead", {}, h("tr", {}, h("th", {}), figures.map((run, index) => h("th", { scope: "col" },
        several && h("i", { class: "dot", style: { background: runs[index].color } }), h("a", { href: this.page.link({ run: run.run, with: runs.map((item) => item.id).filter((id) => id !== run.run).join(","), view: "overview" }) }, run.run), " ", status(run.status))))),
      h("tbody", {}, FIGURES.map(([title, text, name, better, note]) => {
        const top = several && name ? best(name, better) : null;
        return h("tr", { "data-figure": name ?? title }, h("th", { scope: "row" }, title), figures.map((run) => h("td", { class: top !== null && run[name] === top ? "best" : "" },
          text(run), note && note(run) && h("span", { class: "faint" }, ` ${note(run)}`))));
      })),
      several && h("tbody", {}, h("tr", { class: "group-row" }, h("th", { colspan: figures.length + 1 }, settings.length ? "Settings that differ" : "All settings are the same")),
        settings.map((item) => h("tr", { "data-setting": item.name }, h("th", { scope: "row", class: "mono" }, item.name), item.values.map((value) => setting(value)))))));
  }

  update(message) { if (message) this.again(); }
  redraw() { this.load(); }
  destroy() { this.arms.destroy(); }
}

function setting(value) {
  if (value === null) return h("td", { class: "faint" }, "–");
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return h("td", { class: "mono setting", title: text.length > 80 ? text : null }, text.length > 80 ? `${text.slice(0, 77)}…` : text);
}
