// One chart: drawn when it is seen, redrawn when its curves change.

import { h } from "./dom.js";
import { smooth } from "./series.js";

let plotly = null;

/** The chart library, loaded once and after the page itself. */
export function library() {
  plotly ??= new Promise((resolve, reject) => {
    const script = h("script", { src: document.querySelector("meta[name=plotly]").content });
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("the chart library could not be loaded"));
    document.head.append(script);
  });
  return plotly;
}

/** Plotly reads a little markup in texts: names of runs and metrics are no markup. */
export const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

export function colors() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  return {
    text: value("--text"), muted: value("--muted"), grid: value("--grid"), surface: value("--surface"), line: value("--line"),
    series: Array.from({ length: 8 }, (_, index) => value(`--series-${index + 1}`)),
  };
}

// Charts are drawn one after another, the page free to move between two of them.
let turn = Promise.resolve();
function inTurn(draw) {
  const mine = turn.then(draw);
  turn = mine.catch(() => {}).then(() => new Promise((resolve) => setTimeout(resolve)));
  return mine;
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = entry.target.chart;
    chart.visible = entry.isIntersecting;
    if (chart.visible) chart.update();
  }
}, { rootMargin: "40px" });

const DASHES = ["solid", "dot", "dash", "longdash", "dashdot"];
const touch = matchMedia("(pointer: coarse)");

export class Chart {
  /** `page` gives: ready, store, runs() → [{id, color}], smoothing(), axis(), zoom(range | null). */
  constructor(spec, page) {
    this.spec = spec;
    this.page = page;
    this.visible = false;
    this.drawing = false;
    this.plot = h("div", { class: "plot" }, h("div", { class: "skeleton" }));
    this.note = h("span", { class: "note" });
    this.element = h("figure", { class: "chart", "data-chart": spec.id, title: spec.about },
      h("figcaption", {}, h("span", { class: "title" }, spec.title), spec.unit && h("span", { class: "unit" }, spec.unit), this.note),
      this.plot);
    this.element.chart = this;
    seen.observe(this.element);
  }

  destroy() {
    seen.unobserve(this.element);
    if (this.ready) window.Plotly.purge(this.plot);
  }

  runs() {
    const runs = this.page.runs();
    return this.spec.stack ? runs.slice(0, 1) : runs;
  }

  /** Fetch what is missing, draw what is there. */
  async update() {
    if (!this.visible) return;
    const metrics = this.spec.lines.map((line) => line.metric);
    for (const run of this.runs()) this.page.store.want(run.id, metrics);
    if (this.drawing) return;
    this.drawing = true;
    try {
      await this.page.ready;
      const Plotly = await library();
      await inTurn(() => this.draw(Plotly));
    } catch (error) {
      this.note.textContent = error.message;
    } finally {
      this.drawing = false;
    }
  }

  async draw(Plotly) {
    const traces = this.visible ? this.traces(colors()) : null;
    if (traces === null) return;
    this.element.classList.toggle("nothing", !traces.length);
    if (!this.ready) this.plot.replaceChildren();
    await Plotly.react(this.plot, traces, this.layout(colors(), traces), {
      displayModeBar: false, responsive: true, doubleClick: false, showTips: false,
    });
    if (!this.ready) this.listen();
    this.ready = true;
    performance.mark("pods:curve");
  }

  listen() {
    this.plot.on("plotly_relayout", (change) => {
      const [low, high] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (low !== undefined && high !== undefined) this.page.zoom([low, high]);
    });
    this.plot.on("plotly_doubleclick", () => this.page.zoom(null));
  }

  /** Plotly's traces; null while nothing has come yet. */
  traces(palette) {
    const runs = this.runs();
    const several = runs.length > 1;
    const traces = [];
    let fetched = false;
    this.spec.lines.forEach((line, index) => {
      runs.forEach((run, position) => {
        const curve = this.page.store.get(run.id, line.metric);
        fetched ||= curve !== null;
        if (!curve || !curve.mean.some((value) => value !== null)) return;
        const color = several ? run.color : palette.series[index % palette.series.length];
        // the header says which run has which colour: the legend tells the curves of one run apart
        const name = plain(several ? `${run.id} · ${line.name}` : line.name);
        traces.push(...this.curve(curve, { color, name, legend: plain(line.name), first: position === 0, several,
          dash: several ? DASHES[index % DASHES.length] : "solid" }));
      });
    });
    const stale = this.spec.stack && this.page.runs().length > 1 ? `${runs[0].id} only` : "";
    this.note.textContent = stale;
    return fetched ? traces : null;
  }

  curve(curve, { color, name, legend, first, dash, several }) {
    // over wall clock: Plotly counts in milliseconds
    const x = this.page.axis() === "time" ? curve.x.map((value) => value * 1000) : curve.x;
    const base = { x, type: "scatter", connectgaps: true, hoverlabel: { namelength: 40 } };
    if (this.spec.stack) {
      return [{ ...base, y: curve.mean.map((value) => value ?? 0), name, stackgroup: "all", mode: "lines",
        line: { width: 0.5, color }, fillcolor: alpha(color, 0.75), hovertemplate: this.hover(name) }];
    }
    const traces = [];
    const weight = this.spec.marks ? 0 : this.page.smoothing();
    if (curve.low && !several && this.spec.lines.length <= 2) {
      traces.push({ ...base, y: curve.low, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false });
      traces.push({ ...base, y: curve.high, mode: "lines", line: { width: 0 }, fill: "tonexty", fillcolor: alpha(color, 0.13),
        hoverinfo: "skip", showlegend: false });
    }
    if (weight > 0) {
      traces.push({ ...base, y: curve.mean, mode: "lines", line: { width: 1, color: alpha(color, 0.28) }, hoverinfo: "skip", showlegend: false });
    }
    const y = weight > 0 ? smooth(curve.mean, weight) : curve.mean;
    const few = y.filter((value) => value !== null).length <= 40;
    traces.push({ ...base, y, name: legend, showlegend: first, mode: this.spec.marks || few ? "lines+markers" : "lines",
      line: { width: 1.8, color, dash, shape: this.spec.stepped ? "hv" : "linear" }, marker: { size: 5, color },
      hovertemplate: this.hover(name) });
    return traces;
  }

  hover(name) {
    return `${name} <b>%{y:${this.spec.format ?? ".4~g"}}</b><extra></extra>`;
  }

  layout(palette, traces) {
    const axis = this.page.axis();
    const entries = this.spec.lines.length;
    return {
      height: this.element.clientWidth < 360 ? 210 : 240,
      margin: { l: 46, r: 10, t: entries > 1 ? 4 : 10, b: 30 },
      paper_bgcolor: "transparent", plot_bgcolor: "transparent",
      font: { family: "system-ui, sans-serif", size: 11, color: palette.muted },
      hovermode: "x unified", hoverdistance: 30, dragmode: touch.matches ? false : "zoom",
      hoverlabel: { bgcolor: palette.surface, bordercolor: palette.line, font: { color: palette.text, size: 12 } },
      showlegend: entries > 1,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11, color: palette.text }, itemwidth: 30,
        traceorder: "normal" },
      xaxis: { gridcolor: "transparent", linecolor: palette.line, zeroline: false, tickfont: { size: 10.5 }, nticks: 6,
        type: axis === "time" ? "date" : "linear", range: this.page.range() ?? undefined, autorange: !this.page.range(),
        ticks: "outside", tickcolor: palette.line, ticklen: 3, hoverformat: axis === "time" ? undefined : ",.0f",
        title: undefined, ticksuffix: axis === "elapsed" ? " s" : "" },
      yaxis: { gridcolor: palette.grid, zeroline: false, tickfont: { size: 10.5 }, nticks: 5, fixedrange: true,
        type: this.spec.log ? "log" : "linear", tickformat: this.spec.tick ?? (this.spec.format ? ".1~%" : this.spec.log ? ".0e" : undefined),
        rangemode: this.spec.zero || this.spec.stack || this.spec.range ? "tozero" : this.spec.format ? "nonnegative" : "normal", automargin: true,
        exponentformat: "e", ...(this.spec.log ? { dtick: decades(traces) } : {}),
        ...(this.spec.top ? { range: [0, 1.03 * this.spec.top], autorange: false } : {}) },
    };
  }
}

/** Ticks of a logarithmic axis: at 1, 2 and 5 where it spans few decades, else at so many decades that none overlap. */
function decades(traces) {
  const values = traces.flatMap((trace) => trace.y).filter((value) => value > 0);
  const span = values.length ? Math.log10(values.reduce((a, b) => Math.max(a, b)) / values.reduce((a, b) => Math.min(a, b))) : 0;
  return span < 2 ? "D2" : Math.ceil(span / 5);
}

export function alpha(color, opacity) {
  const value = parseInt(color.slice(1), 16);
  return `rgba(${value >> 16},${(value >> 8) & 255},${value & 255},${opacity})`;
}
