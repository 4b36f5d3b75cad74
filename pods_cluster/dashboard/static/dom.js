// Elements and text. Everything that comes from a run goes through text nodes: nothing here reads markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element: h("p", {class: "x", onclick: f}, "text", child). Children that are null or false are left out. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, item] of Object.entries(value)) element.style.setProperty(key, item);
    else if (name === "checked" || name === "value" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) append(element, child);
    else if (child instanceof Node) element.append(child);
    else if (child !== null && child !== undefined && child !== false) element.append(document.createTextNode(String(child)));
  }
}

export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

export const $ = (id) => document.getElementById(id);

/** Three or so significant digits: 0.000123, 1.23, 12.3, 1,234, 12.3k, 4.5M. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e4) {
    const unit = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([scale]) => size >= scale * 0.9995);
    return `${Number((value / unit[0]).toPrecision(digits))}${unit[1]}`;
  }
  if (size >= 1000 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  if (size < 1e-3 && size > 0) return value.toExponential(1).replace("e-", "e−");
  return String(Number(value.toPrecision(digits)));
}

export function percent(value, digits = 0) {
  return Number.isFinite(value) ? `${(value * 100).toFixed(digits)} %` : "–";
}

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${number(seconds * 1000, 2)} ms`;
  if (seconds < 100) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

export function ago(time) {
  if (!Number.isFinite(time)) return "–";
  const seconds = Math.max(Date.now() / 1000 - time, 0);
  return seconds < 2 ? "now" : `${duration(Math.round(seconds))} ago`;
}

export function clock(time) {
  return Number.isFinite(time) ? new Date(time * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "medium" }) : "";
}

export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
}

/** The same function at most once in `wait` ms, the last call always carried out. */
export function throttle(run, wait) {
  let timer = null;
  let last = 0;
  return () => {
    if (timer !== null) return;
    timer = setTimeout(() => { timer = null; last = performance.now(); run(); }, Math.max(wait - (performance.now() - last), 0));
  };
}

export function stored(name, fallback) {
  try { return JSON.parse(localStorage.getItem(`pods.${name}`)) ?? fallback; } catch { return fallback; }
}

export function store(name, value) {
  try { localStorage.setItem(`pods.${name}`, JSON.stringify(value)); } catch { /* private mode: not kept */ }
}
