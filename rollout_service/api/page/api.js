// Calls of the service. What always holds: the key stands in this tab's sessionStorage and in the Authorization
// header, nowhere else; every address is relative to the page, so that a proxy may put the service under any path.

const KEY = "rollout-service-key";

/** What the service, or the way to it, refused. `status` is 0 where no answer came. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return keptHere;
  }
}

let keptHere = "";

export function storeKey(key) {
  keptHere = key;
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // Storage is switched off in this browser: the key lives as long as the page.
  }
}

/** An answer with status 200. Raises `Refused`, and AbortError when `signal` fires. */
export async function ask(path, { signal, query = {} } = {}) {
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== ""));
  const address = search.size ? `${path}?${search}` : path;
  const key = storedKey();
  let answer;
  try {
    answer = await fetch(address, {
      signal,
      cache: "no-store",
      headers: key ? { Authorization: `Bearer ${key}` } : {},
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the service does not answer");
  }
  if (answer.status !== 200) throw new Refused(answer.status, await problem(answer));
  return answer;
}

export async function askJson(path, options) {
  const answer = await ask(path, options);
  try {
    return await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the answer broke off");
  }
}

/** The `detail` of a problem document; where there is none, the status. */
async function problem(answer) {
  const body = await answer.json().catch(() => null);
  return typeof body?.detail === "string" ? body.detail : `HTTP status ${answer.status}`;
}
