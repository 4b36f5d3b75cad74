// The server: requests, and the stream of what runs write.

export class ApiError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

let unauthorized = () => {};
export function onUnauthorized(handler) { unauthorized = handler; }

export async function get(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== null && item !== undefined) query.append(name, item);
    }
  }
  const text = query.toString();
  return answer(await fetch(text ? `${path}?${text}` : path, { headers: { accept: "application/json" } }));
}

export async function post(path, body) {
  return answer(await fetch(path, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  }));
}

async function answer(response) {
  if (response.ok) return response.status === 204 ? null : response.json();
  let detail = `${response.status} ${response.statusText}`;
  try {
    const told = (await response.json()).detail;
    detail = typeof told === "string" ? told : told.map((item) => `${item.loc.slice(1).join(".")}: ${item.msg}`).join("; ");
  } catch { /* no JSON: the status line says it */ }
  if (response.status === 401) unauthorized();
  throw new ApiError(response.status, detail);
}

export const runPath = (run) => `/api/runs/${encodeURIComponent(run)}`;

/** Follow runs; `handlers` are update(message), resync(), state(connected). Returns a function that ends it. */
export function follow(runs, handlers) {
  const query = new URLSearchParams();
  for (const run of runs) query.append("run", run);
  const source = new EventSource(`/api/stream?${query}`);
  let opened = false;
  source.addEventListener("hello", () => {
    handlers.state(true);
    if (opened) handlers.resync(); // was away: steps may have been missed
    opened = true;
  });
  source.addEventListener("update", (event) => handlers.update(JSON.parse(event.data)));
  source.addEventListener("resync", () => handlers.resync());
  source.addEventListener("error", () => handlers.state(false));
  return () => source.close();
}
