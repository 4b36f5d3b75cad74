// Signing in, and changing a live run.

import { get, post, runPath } from "./api.js";
import { $, h, number, replace } from "./dom.js";

export function signIn(done, why = "This dashboard needs its token.") {
  const dialog = $("dialog");
  if (dialog.open) return;
  const problem = h("p", { class: "problem", role: "alert" });
  const token = h("input", { type: "password", autocomplete: "current-password", "aria-label": "Token", required: true });
  const form = h("form", { onsubmit: async (event) => {
    event.preventDefault();
    try {
      await post("/api/login", { token: token.value });
      dialog.close();
      done();
    } catch (error) { problem.textContent = error.message; }
  } }, h("h2", {}, "Sign in"), h("p", {}, why, " It lies in the file that `pods dashboard` named when it started."), token, problem,
  h("div", { class: "buttons" }, h("button", { class: "button", type: "button", onclick: () => dialog.close() }, "Cancel"),
    h("button", { class: "button primary", type: "submit" }, "Sign in")));
  replace(dialog, form);
  dialog.showModal();
  token.focus();
}

export async function manage(page) {
  const session = await get("/api/session");
  if (!session.signed_in) { signIn(() => manage(page), "Changing a run needs the token."); return; }
  const dialog = $("dialog");
  const run = page.run;
  const told = h("p", { class: "told", role: "status" });
  const status = h("div", { class: "faint", id: "live" }, "Asking the run …");
  const field = (label, value) => {
    const input = h("input", { type: "number", min: 1, max: 4096, value, "aria-label": label });
    return [input, h("label", {}, label, input)];
  };
  const [generators, generatorLabel] = field("generators", page.detail?.latest["generator/workers"] ?? page.config.generator?.workers ?? 1);
  const [learners, learnerLabel] = field("learners", page.detail?.latest["learner/workers"] ?? page.config.learner?.workers ?? 1);
  const ask = async (path, body) => {
    told.className = "told";
    told.textContent = "Asking …";
    try {
      told.textContent = (await post(`${runPath(run)}/${path}`, body)).detail;
    } catch (error) {
      told.className = "problem";
      told.textContent = error.message;
    }
    refresh();
  };
  const stop = h("button", { class: "button danger", type: "button", onclick: () => {
    if (stop.dataset.sure) { ask("stop", { reason: "stopped from the dashboard" }); return; }
    stop.dataset.sure = "1";
    stop.textContent = "Stop it: are you sure?";
    setTimeout(() => { delete stop.dataset.sure; stop.textContent = "Stop the run"; }, 4000);
  } }, "Stop the run");
  let touched = false;
  for (const input of [generators, learners]) input.addEventListener("input", () => { touched = true; });
  const refresh = async () => {
    try {
      page.liveStatus = await get(`${runPath(run)}/live`);
      const live = page.liveStatus;
      if (!touched && live.target_generators) [generators.value, learners.value] = [live.target_generators, live.target_learners];
      status.textContent = ["alive", live.step === null ? null : `step ${number(live.step)}`, live.generators === null ? null : `${live.generators} generators`,
        live.learners === null ? null : `${live.learners} learners`, live.note, live.stopping && `stopping: ${live.stopping}`].filter(Boolean).join(" · ");
    } catch (error) { page.liveStatus = null; status.textContent = error.message; }
  };
  const timer = setInterval(refresh, 1500);  // a change takes its time: it is watched while the dialog is open
  dialog.addEventListener("close", () => clearInterval(timer), { once: true });
  replace(dialog, h("form", { method: "dialog" }, h("h2", {}, `Manage ${run}`), status,
    h("fieldset", {}, h("legend", {}, "Pools"), generatorLabel, learnerLabel,
      h("button", { class: "button primary", type: "button", onclick: () => ask("scale", { generators: Number(generators.value), learners: Number(learners.value) }) }, "Scale")),
    h("p", { class: "faint" }, "New generators hold the current weights before they serve; the learner group is rebuilt between two steps."),
    told, h("div", { class: "buttons" }, stop, h("button", { class: "button", type: "submit" }, "Close"))));
  dialog.showModal();
  refresh();
}
