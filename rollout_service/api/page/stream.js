// The live view: one streamed fetch of /events, for ever.
//
// What always holds: at most one connection at a time; whatever ends it, there is another try, the waits between tries
// grow to MAX_WAIT_MS and start again small after a good line; only the newest complete line of a chunk is parsed and
// nothing but it is kept, so that a tab hidden for days holds one object. After 401 and 403 it waits for `restart`.

import { ask, Refused } from "./api.js";

const MIN_WAIT_MS = 500;
const MAX_WAIT_MS = 10_000;
/** The service says something at least every 5 s; silence of this length is a dead connection. */
const SILENCE_MS = 15_000;
/** A line is a few kilobytes; what never ends is not ours. */
const MAX_LINE = 16 * 1024 * 1024;

/**
 * `onLive(object)` for every new state of the run; `onLink(link)` where `link.state` is "live", "lost" (with `since`,
 * `error`, `retryAt`), "unauthorized" or "forbidden" (with `error`). Times are Date.now() of this machine.
 */
export function openStream({ onLive, onLink }) {
  const stream = { wait: MIN_WAIT_MS, since: null, heard: null, timer: 0, silence: 0, ending: null };

  async function connect() {
    clearTimeout(stream.timer);
    const ending = (stream.ending = new AbortController());
    const current = () => stream.ending === ending;
    const hush = () => {
      clearTimeout(stream.silence);
      stream.silence = setTimeout(() => ending.abort(), SILENCE_MS);
    };
    let error;
    try {
      hush();
      const answer = await ask("events", { signal: ending.signal });
      for await (const line of newestLines(answer.body, hush)) {
        if (!current()) return;
        const live = JSON.parse(line);
        stream.wait = MIN_WAIT_MS;
        stream.since = null;
        stream.heard = Date.now();
        onLink({ state: "live" });
        onLive(live);
      }
      error = new Refused(0, "the service ended the connection");
    } catch (caught) {
      error = caught;
    }
    clearTimeout(stream.silence);
    if (!current()) return;
    if (error.status === 401 || error.status === 403) {
      onLink({ state: error.status === 401 ? "unauthorized" : "forbidden", error: error.message });
      return;
    }
    stream.since ??= stream.heard ?? Date.now();
    const wait = stream.wait * (0.75 + 0.5 * Math.random());
    stream.wait = Math.min(MAX_WAIT_MS, stream.wait * 2);
    onLink({ state: "lost", since: stream.since, error: why(error), retryAt: Date.now() + wait });
    stream.timer = setTimeout(connect, wait);
  }

  function restart() {
    stream.wait = MIN_WAIT_MS;
    stream.ending?.abort();
    connect();
  }

  // The machine woke, or its network is back: do not sit out a wait.
  window.addEventListener("online", restart);
  connect();
  return { restart };
}

function why(error) {
  if (error.name === "AbortError") return `it said nothing for ${SILENCE_MS / 1000} s`;
  if (error instanceof SyntaxError) return "a line of /events is not JSON";
  return error instanceof Refused ? error.message : "the connection broke";
}

/** The last complete line of everything that has arrived; lines may be cut anywhere, inside a character too. */
async function* newestLines(body, onChunk) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      onChunk();
      rest += decoder.decode(value, { stream: true });
      const end = rest.lastIndexOf("\n");
      if (end >= 0) {
        const line = rest.slice(rest.lastIndexOf("\n", end - 1) + 1, end).trim();
        rest = rest.slice(end + 1);
        if (line) yield line;
      }
      if (rest.length > MAX_LINE) throw new Refused(0, "a line of /events has no end");
    }
  } finally {
    reader.cancel().catch(() => {}); // it has ended, or its end is what brought us here
  }
}
