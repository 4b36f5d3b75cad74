// The page: which runs and which view, kept in the address; what is known of them, kept fresh by the stream.

import { follow, get, onUnauthorized, runPath } from "./api.js";
import { Charts } from "./charts.js";
import { manage, signIn } from "./controls.js";
import { $, h, number, replace, store, stored, throttle } from "./dom.js";
import { Compare } from "./compare.js";
import { Config, Events } from "./events.js";
import { healthLine } from "./health.js";
import { Overview } from "./overview.js";
import { picker, progress } from "./picker.js";
import { library } from "./plot.js";
import { Rollouts } from "./rollouts.js";
import { SeriesStore } from "./series.js";

const VIEWS = { overview: ["Overview", Overview], charts: ["Charts", Charts], rollouts: ["Rollouts", Rollouts], events: ["Events", Events], compare: ["Compare", Compare], config: ["Config", Config] };
const LIST_MS = 5000;

const page = {
  runList: [], run: null, compared: [], viewName: "overview", view: null, detail: null, config: {}, recent: [], liveStatus: null,
  place: {}, connected: null, canManage: false, ready: null,
  store: new SeriesStore(() => redraw()),
  runs() {
    const style = getComputedStyle(document.documentElement);
    return [this.run, ...this.compared].filter(Boolean).map((id, index) => ({ id, color: style.getPropertyValue(`--series-${(index % 8) + 1}`).trim() }));
  },
  smoothing: () => stored("smoothing", 0),
  setSmoothing(value) { store("smoothing", value); redraw(); },
  axis() { return this.store.axis; },
  setAxis(axis) { store("axis", axis); this.shown = null; this.store.set({ axis, range: null }); this.view?.redraw(); },
  shown: null,
  range() { return this.shown; },
  zoom(range) {
    this.shown = range;
    // steps are what the server knows ranges of; over other axes the curves at hand are looked at more closely
    if (this.axis() === "step") this.store.set({ range: range && [Math.max(0, Math.floor(range[0])), Math.max(0, Math.ceil(range[1]))] });
    this.view?.redraw();
  },
  link(change) {
    const next = { run: this.run, with: this.compared.join(","), view: this.viewName, ...change };
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(next)) if (value && !(name === "view" && value === "overview")) query.set(name, value);
    return `#${query}`;
  },
  go(change) { location.hash = this.link(change); },
};
page.store.axis = ["step", "elapsed", "time"].includes(stored("axis", "step")) ? stored("axis", "step") : "step";
// Resolved once the first numbers are painted: the chart library, which takes longest, comes after them.
let isReady;
page.ready = new Promise((resolve) => { isReady = resolve; });
window.podsPage = page;

const redraw = throttle(() => page.view?.redraw(), 150);
const refreshView = throttle(() => { page.view?.update(page.lastMessage); header(); }, 120);

function header() {
  picker($("picker"), page);
  progress($("progress"), page);
  document.title = page.run ? `${page.detail?.step !== null && page.detail ? `${page.detail.step} · ` : ""}${page.run} · pods` : "pods";
  const tabs = $("tabs");
  const scrolled = tabs.scrollLeft;
  replace(tabs, page.run && Object.entries(VIEWS).map(([name, [title]]) => {
    const count = { rollouts: page.detail?.samples, compare: page.compared.length && page.compared.length + 1, events: (page.detail?.warnings ?? 0) + (page.detail?.errors ?? 0) }[name];
    return h("a", { href: page.link({ view: name }), "aria-current": name === page.viewName ? "page" : null, class: name === "events" && page.detail?.errors ? "bad" : "" },
      title, count > 0 && h("span", { class: "count" }, number(count)));
  }));
  tabs.scrollLeft = scrolled;
  const current = tabs.querySelector("[aria-current]");
  if (current && tabs.dataset.view !== page.viewName) { // a narrow page: the chosen tab is brought to sight
    tabs.dataset.view = page.viewName;
    tabs.scrollLeft = Math.max(0, current.offsetLeft - tabs.offsetLeft - (tabs.clientWidth - current.offsetWidth) / 2);
  }
  $("manage").hidden = !(page.canManage && page.run && ["running", "silent"].includes(page.detail?.status));
  healthLine($("health"), page.run ? page.detail : null);
  notice();
}

function notice() {
  const { detail } = page;
  let text = "";
  let kind = "info";
  if (page.connected === false) { text = "The dashboard's server does not answer; trying again."; kind = "warning"; }
  else if (detail && detail.progress < 1) text = `Reading the history: ${Math.round(detail.progress * 100)} %. Curves are a sample of it until then.`;
  else if (detail?.status === "failed") { text = `The run failed: ${detail.status_text}`; kind = "error"; }
  else if (detail?.status === "killed") { text = `The run was killed: ${detail.status_text}.`; kind = "error"; }
  else if (detail?.nonfinite.length) {
    const worst = detail.nonfinite.reduce((a, b) => (a.last_step >= b.last_step ? a : b));
    text = `${worst.metric} was not finite at ${number(worst.count)} step${worst.count === 1 ? "" : "s"}, last at step ${worst.last_step}.`;
    kind = "warning";
  }
  const box = $("notice");
  box.hidden = !text;
  box.className = `notice ${kind}`;
  if (box.textContent !== text) box.textContent = text;
}

async function loadList() {
  try {
    page.runList = (await get("/api/runs")).runs;
    if (page.connected === false && !page.run) page.connected = null;
  } catch (error) {
    if (error.status === undefined) page.connected = false;
    throw error;
  }
}

/** Bring the page to what the address says. */
async function route() {
  const query = new URLSearchParams(location.hash.slice(1));
  const known = new Set(page.runList.map((run) => run.id));
  const run = known.has(query.get("run")) ? query.get("run") : page.runList[0]?.id ?? null;
  const compared = (query.get("with") ?? "").split(",").filter((id) => known.has(id) && id !== run).slice(0, 7);
  const viewName = Object.hasOwn(VIEWS, query.get("view") ?? "") ? query.get("view") : "overview";
  const changed = run !== page.run || compared.join() !== page.compared.join();
  const moved = run !== page.run || viewName !== page.viewName || !page.view;
  if (run !== page.run) Object.assign(page, { detail: null, config: {}, recent: [], liveStatus: null, place: {}, shown: null });
  Object.assign(page, { run, compared, viewName });
  if (changed) {
    page.store.set({ range: null });
    page.shown = null;
    listen();
  }
  if (run === null) {
    page.view?.destroy();
    page.view = null;
    replace($("main"), h("div", { class: "empty" }, h("h2", {}, "No runs yet"), h("p", {}, "A run appears here as soon as it makes its folder: start one with `pods train run.yaml`.")));
    header();
    return;
  }
  if (moved) show();
  else if (changed) page.view.redraw();
  header();
  if (page.detail === null) await loadRun();
}

function show() {
  page.view?.destroy();
  page.view = new VIEWS[page.viewName][1](page);
  replace($("main"), page.view.element);
  if (page.detail) page.view.update();
  scrollTo(0, 0);
}

async function loadRun() {
  const { run } = page;
  const [detail, config, events] = await Promise.all([
    get(runPath(run)), get(`${runPath(run)}/config`), get(`${runPath(run)}/events`, { limit: 10 })]);
  if (run !== page.run) return;
  Object.assign(page, { detail, config: config.config, recent: events.events });
  page.view?.update();
  performance.mark("pods:numbers");
  header();
}

let quit = () => {};
function listen() {
  quit();
  const runs = page.runs().map((run) => run.id);
  if (!runs.length) return;
  quit = follow(runs, { update: told, resync: () => reload(), state: (connected) => { page.connected = connected; header(); } });
}

function told(message) {
  const reading = page.detail && page.detail.progress < 1;
  if (message.reset) page.store.reset(message.run);
  else {
    let after = message.after;
    for (const row of message.rows) { page.store.append(message.run, row, after); after = row.step; }
  }
  if (message.run === page.run && page.detail) {
    const { latest, ...live } = message.live;
    const fresh = Object.keys(latest).some((name) => !(name in page.detail.latest));
    Object.assign(page.detail, live, { latest });
    if (message.events.length) page.recent = [...message.events.toReversed(), ...page.recent].slice(0, 10);
    page.lastMessage = message;
    if (fresh || (reading && live.progress >= 1)) freshDetail();
    refreshView();
  }
  if (message.rows.length) redraw();
}

/** New metrics came, or all steps are read: what is told only on request is asked for again. */
const freshDetail = throttle(async () => {
  const detail = await get(runPath(page.run)).catch(() => null);
  if (detail && detail.id === page.run) { page.detail = detail; refreshView(); }
}, 1000);

function reload() {
  for (const run of page.runs()) page.store.refresh(run.id);
  loadRun().catch((error) => console.warn(error.message));
}

function theme() {
  const button = $("theme");
  const dark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => { button.textContent = dark() ? "☀" : "☾"; };
  const repaint = () => { label(); header(); page.view?.redraw(); page.view?.recolor?.(); };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("pods.theme", document.documentElement.dataset.theme); } catch { /* not kept */ }
    repaint();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  label();
}

async function start() {
  theme();
  onUnauthorized(() => signIn(() => location.reload(), "Reading from another machine needs the token."));
  $("manage").addEventListener("click", () => manage(page));
  addEventListener("hashchange", () => route().catch(fail));
  try {
    await loadList();
    await route();
  } catch (error) { fail(error); }
  requestAnimationFrame(() => setTimeout(isReady));
  setTimeout(isReady, 1000); // a page in the background paints nothing
  page.ready.then(library).catch(fail);
  get("/api/session").then((session) => { page.canManage = session.controls; header(); }).catch(() => {});
  setInterval(() => {
    if (document.hidden) return;
    loadList().then(() => (page.run === null ? route() : header())).catch(() => header());
  }, LIST_MS);
  setInterval(() => {
    if (document.hidden || !page.detail) return;
    progress($("progress"), page);
    if (page.detail.progress < 1) freshDetail();
  }, 1000);
}

function fail(error) {
  if (!page.view) replace($("main"), h("p", { class: "empty" }, error.message));
  console.warn(error.message);
}

start();
