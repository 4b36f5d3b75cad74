// Curves by run and metric: fetched in batches, kept growing by what the stream tells.

import { get, runPath } from "./api.js";

const BATCH = 60;
const BATCH_MS = 12;
const REFETCH_AFTER = 256; // points told one by one, after which curves are fetched anew
const RECENT = 64; // told steps that are remembered: an answer that was under way does not have them
const READING_MS = 700; // between two looks at a run whose history the server still reads

export class SeriesStore {
  /** `changed(run)` is called when curves of a run have changed. */
  constructor(changed) {
    this.changed = changed;
    this.curves = new Map(); // run → metric → {x, mean, low, high, bucket, last (step)}
    this.waiting = new Map(); // run → metrics to fetch
    this.told = new Map();
    this.recent = new Map(); // run → [{row, after}]
    this.turns = new Map(); // run → how often it was refreshed
    this.reading = new Map(); // run → timer, while what is known of it is a part
    this.axis = "step";
    this.range = null;
    this.points = 700;
    this.generation = 0;
    this.timer = null;
  }

  get(run, metric) {
    return this.curves.get(run)?.get(metric) ?? null;
  }

  /** See that these metrics come. */
  want(run, metrics) {
    const known = this.curves.get(run);
    const missing = metrics.filter((metric) => !known?.has(metric));
    if (!missing.length) return;
    if (!this.waiting.has(run)) this.waiting.set(run, new Set());
    for (const metric of missing) this.waiting.get(run).add(metric);
    this.timer ??= setTimeout(() => { this.timer = null; this.fetch(); }, BATCH_MS);
  }

  /** Another axis or range: fetch everything again when it is wanted. */
  set({ axis = this.axis, range = this.range }) {
    this.axis = axis;
    this.range = range;
    this.forget();
  }

  forget(run = null) {
    this.generation += 1;
    if (run === null) { this.curves.clear(); this.told.clear(); } else { this.curves.delete(run); this.told.delete(run); }
  }

  turn(run) { return this.turns.get(run) ?? 0; }

  /** Steps were taken back: what was told of them is not to come back. */
  reset(run) {
    this.recent.delete(run);
    this.refresh(run);
  }

  /** Fetch anew what is known of a run; the old curves stay until the new ones are there. */
  refresh(run) {
    const metrics = [...(this.curves.get(run)?.keys() ?? [])];
    this.told.set(run, 0);
    this.turns.set(run, this.turn(run) + 1);
    for (let index = 0; index < metrics.length; index += BATCH) this.load(run, metrics.slice(index, index + BATCH));
  }

  /** A step that the stream told, and the step `after` which it came: where that one is missing, something was missed. */
  append(run, row, after = null) {
    this.recent.set(run, [...(this.recent.get(run) ?? []), { row, after }].slice(-RECENT));
    this.apply(run, row, after, 0);
    const told = (this.told.get(run) ?? 0) + 1;
    this.told.set(run, told);
    if (told >= REFETCH_AFTER) this.refresh(run);
  }

  /** Put a told step into the curves that end before it, or at it with `again` 0. */
  apply(run, row, after, again) {
    const known = this.curves.get(run);
    if (!known || this.range) return;
    const x = row[this.axis === "step" ? "step" : this.axis];
    if (x === undefined) return;
    if (after !== null && [...known.values()].some((curve) => curve.last !== null && curve.last < after)) {
      for (const curve of known.values()) curve.last = row.step;
      this.refresh(run);
      return;
    }
    for (const [metric, curve] of known) {
      if (curve.last !== null && row.step < curve.last + again) continue; // the curve is newer than the message
      curve.last = row.step;
      const value = row[metric];
      if (value === undefined) continue;
      const last = curve.x.length - 1;
      if (last >= 0 && curve.x[last] === x) {
        curve.mean[last] = value;
      } else {
        curve.x.push(x);
        curve.mean.push(value);
        curve.low?.push(value);
        curve.high?.push(value);
      }
    }
  }

  fetch() {
    for (const [run, metrics] of this.waiting) {
      const names = [...metrics];
      for (let index = 0; index < names.length; index += BATCH) this.load(run, names.slice(index, index + BATCH));
    }
    this.waiting.clear();
  }

  async load(run, metrics) {
    const generation = this.generation;
    const turn = this.turn(run);
    let found;
    try {
      found = await get(`${runPath(run)}/series`, {
        metric: metrics, x: this.axis, points: this.points, start: this.range?.[0], end: this.range?.[1],
      });
    } catch (error) {
      console.warn(`curves of ${run}: ${error.message}`);
      return;
    }
    if (generation !== this.generation) return;
    if (!this.curves.has(run)) this.curves.set(run, new Map());
    const known = this.curves.get(run);
    for (const [metric, curve] of Object.entries(found.series)) {
      if ((known.get(metric)?.turn ?? 0) > turn) continue; // answers may overtake each other
      known.set(metric, { x: found.x.slice(), mean: curve.mean, low: curve.low, high: curve.high, bucket: found.bucket, last: found.last_step, turn });
    }
    // what was under way when the run was refreshed may be from before
    const old = metrics.filter((metric) => (known.get(metric)?.turn ?? 0) < this.turn(run));
    if (turn < this.turn(run) && old.length) this.load(run, old);
    if (found.progress >= 1) {
      for (const { row, after } of this.recent.get(run) ?? []) this.apply(run, row, after, 1);
    } else if (!this.reading.has(run)) {
      this.reading.set(run, setTimeout(() => { this.reading.delete(run); this.refresh(run); }, READING_MS));
    }
    this.changed(run);
  }
}

/** Exponential mean with `weight` in 0 … 1 on the past, its start corrected, as TensorBoard and W&B draw it. */
export function smooth(values, weight) {
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}
