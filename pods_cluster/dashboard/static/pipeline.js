// The pipeline as it stands: dataset → generators → scorers → selector → learner, and the weights' way back.

import { bytes, duration, h, number, percent, replace } from "./dom.js";

const rate = (value, unit) => (value === undefined ? null : `${number(value)} ${unit}/s`);

export class Pipeline {
  constructor() {
    this.element = h("section", { class: "card pipeline", "aria-label": "Pipeline" });
    this.drawn = "";
  }

  update(detail, config) {
    const model = describe(detail, config);
    const text = JSON.stringify(model);
    if (text === this.drawn) return;
    this.drawn = text;
    const parts = [];
    model.nodes.forEach((node, index) => {
      parts.push(box(node, index));
      if (index < model.edges.length) parts.push(edge(model.edges[index], index, model.moving));
    });
    replace(this.element,
      h("div", { class: "flow" }, parts,
        h("div", { class: `back ${model.moving ? "moving" : ""}` }, h("span", { class: "back-arrow", "aria-hidden": "true" }),
          h("span", { class: "back-text" }, h("b", {}, model.back.title), model.back.text && h("span", {}, model.back.text)))));
  }
}

function box(node, index) {
  return h("div", { class: `node node-${index}` },
    h("div", { class: "node-name" }, node.name, node.count && h("span", { class: "count" }, node.count)),
    node.lines.filter((item) => item[1] !== null).map(([label, value, level]) => h("div", { class: "node-line" },
      h("span", {}, label), h("b", { class: level ?? "" }, value))),
    node.meter !== undefined && h("div", { class: "meter", title: `${percent(1 - node.meter)} busy` },
      h("i", { style: { width: `${Math.round((1 - node.meter) * 100)}%` } })));
}

function edge(item, index, moving) {
  return h("div", { class: `edge edge-${index} ${moving ? "moving" : ""}` },
    h("span", { class: "edge-text" }, item ?? ""), h("span", { class: "edge-line", "aria-hidden": "true" }));
}

function describe(detail, config) {
  const { latest, rates } = detail;
  const size = config.generator?.rollouts_per_prompt;
  const at = (name) => latest[name];
  const shown = (name, format = number) => (at(name) === undefined ? null : format(at(name)));
  const generated = rates["rollouts/generated"];
  const waiting = at("generator/waiting");
  const failures = Object.entries(detail.totals).filter(([name]) => name.startsWith("scoring/failures/"))
    .reduce((sum, [, count]) => sum + count, 0);
  return {
    moving: detail.status === "running",
    nodes: [
      { name: "Dataset", lines: [
        ["epoch", shown("epoch", (value) => value.toFixed(2))],
        ["prompts served", detail.totals["data/prompts_served"] === undefined ? null : number(detail.totals["data/prompts_served"])],
        ["a step", config.learner?.prompts_per_step ? `${number(config.learner.prompts_per_step)} prompts` : null],
        ["dropped", at("data/prompts_dropped_overlong") ? number(detail.totals["data/prompts_dropped_overlong"]) : null, "warn"],
      ] },
      { name: "Generators", count: workers(at("generator/workers"), at("generator/target") ?? config.generator?.workers), meter: at("generator/idle_share"), lines: [
        ["decoding", shown("generator/running")],
        ["queued", shown("generator/waiting"), waiting > 0 ? "busy" : ""],
        ["tokens", rate(at("generator/tokens_per_second"), "")],
        ["KV cache", at("generator/kv_cache_usage") ? percent(at("generator/kv_cache_usage")) : null],
        ["idle", shown("generator/idle_share", percent)],
      ] },
      { name: "Scorers", lines: [
        ["rewards", config.reward?.length ? String(config.reward.length) : null],
        ["to a reward", shown("scoring/seconds_mean", duration)],
        ["failed", failures ? number(failures) : null, "warn"],
        ["left out", detail.totals["rollouts/excluded"] ? number(detail.totals["rollouts/excluded"]) : null, "warn"],
      ] },
      { name: "Selector", lines: [
        ["rule", config.selector?.rule ?? null],
        ["keeps", config.selector?.keep && size ? `${config.selector.keep} of ${size}` : null],
        ["groups in flight", shown("groups/in_flight")],
        ["groups queued", shown("groups/queued")],
      ] },
      { name: "Learner", count: workers(at("learner/workers"), at("learner/target") ?? config.learner?.workers), meter: at("learner/idle_share"), lines: [
        ["update", shown("timing_s/update", duration)],
        ["tokens", rate(at("learner/tokens_per_second"), "")],
        ["staleness", shown("staleness/mean")],
        ["idle", shown("learner/idle_share", percent)],
      ] },
    ],
    edges: [
      generated !== undefined && size ? rate(generated / size, "prompts") : rate(rates["data/prompts_served"], "prompts"),
      rate(generated, "rollouts"), rate(rates["rollouts/scored"], "scored"), rate(rates["rollouts/selected"], "kept"),
    ].map((text) => text?.replace(" /s", "/s") ?? null),
    back: {
      title: at("weights/version") === undefined ? "weights back" : `weights v${number(at("weights/version"))} back`,
      text: [at("weights/bytes") ? bytes(at("weights/bytes")) : null, shown("weights/sync_seconds", duration),
        at("weights/receivers") === undefined ? null : `${number(at("weights/receivers"))} receiver${at("weights/receivers") === 1 ? "" : "s"}`,
        at("weights/failed") ? `${number(at("weights/failed"))} failed` : null].filter(Boolean).join(" · "),
    },
  };
}

function workers(serving, wanted) {
  if (serving === undefined) return wanted ? `×${wanted}` : null;
  return wanted > serving ? `${number(serving)} of ${wanted}` : `×${number(serving)}`;
}
