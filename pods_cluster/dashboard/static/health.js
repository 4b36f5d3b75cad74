// The run's health in one line, and what went wrong in it.

import { h, number, percent, replace } from "./dom.js";

const ENDED = ["finished", "stopped", "failed", "killed"];

/** The line at the top of the page. What the rules found opens under it, each with the way to its paragraph. */
export function healthLine(element, detail) {
  const health = detail?.health ?? null;
  const told = JSON.stringify([health, detail?.status]);
  if (element.dataset.told === told) return;
  element.dataset.told = told;
  element.hidden = health === null;
  if (health === null) return;
  const open = element.querySelector("details")?.open ?? false;
  element.className = `health ${health.level}`;
  const when = ENDED.includes(detail.status) && h("span", { class: "faint" }, "at the end: ");
  const line = [h("i", { class: "dot", "aria-hidden": "true" }), h("span", { class: "health-text" }, when, words(health.line))];
  if (!health.findings.length) { replace(element, h("div", { class: "health-line" }, line)); return; }
  replace(element, h("details", { open }, h("summary", { class: "health-line" }, line, h("span", { class: "button small" }, "What to do")),
    h("ul", {}, health.findings.map((finding) => h("li", { class: finding.level, "data-rule": finding.rule },
      h("span", { class: "badge" }, finding.rule), h("span", {}, words(`${finding.text}; ${finding.advice}. `), guide(finding.link)))),
    health.pace && !health.findings.some((finding) => finding.rule === "bottleneck") && h("li", { class: "faint" }, h("span", { class: "badge" }, "pace"), h("span", {}, health.pace)))));
}

/** Text in which `this` is code. */
const words = (text) => text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));

export const guide = (link) => h("a", { href: link, target: "_blank", rel: "noopener" }, "Read more");

/** What failed in a run: its end, the rewards that gave no number, the workers that went; null where nothing did. */
export function problems(detail, eventLine) {
  const ended = ["failed", "killed"].includes(detail.status);
  const workers = detail.worker_events.filter((event) => event.kind === "worker_failed").slice(-4).reverse();
  if (!detail.reward_failures.length && !(ended && workers.length)) return null;
  const rewards = detail.reward_failures.map((failure) => newest(failure, detail.totals)).sort((a, b) => b.count - a.count);
  return h("section", { class: `card problems ${ended ? "error" : "warning"}`, "aria-label": "What failed" }, h("h2", {}, "What failed"),
    rewards.map((failure) => h("div", { class: "failure", "data-reward": failure.reward },
      h("div", { class: "failure-head" }, h("b", {}, failure.reward), h("span", { class: "badge" }, failure.failure),
        h("span", { class: "faint" }, `gave no number ${number(failure.count)} time${failure.count === 1 ? "" : "s"}, ${percent(failure.share, failure.share < 0.1 ? 1 : 0)} of the scorings; these rollouts are left out`)),
      failure.message && h("pre", { class: "text" }, failure.message))),
    ended && workers.length > 0 && [rewards.length > 0 && h("h3", {}, "Workers"), workers.map(eventLine)]);
}

/** A failure with the count of all steps: the events told it at 1, 10, 100, … */
function newest(failure, totals) {
  const count = totals[`scoring/failures/${failure.failure}/${failure.reward}`] ?? 0;
  const rollouts = totals["rollouts/generated"];
  return count > failure.count && rollouts ? { ...failure, count, share: Math.min(count / rollouts, 1) } : failure;
}
