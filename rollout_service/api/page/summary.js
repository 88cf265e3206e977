// One sentence: what the run is doing now, and what a person has to do. Pure: ages are by the service's own clock.
//
// What always holds: the worst thing comes first. A halt is said before a pause, for a pause is somebody's wish;
// trouble of the store before both, for nothing can end while it lasts.

import { clock, count, duration, host, rate, short, whole } from "./format.js";

/**
 * `live` is one object of /events. Gives `tone` ("bad", "warn", "wait", "good", "idle"), `mark`, `headline` (without
 * numbers: it is read aloud when it changes), `sentence` (which goes on from it after a colon, or at once if `joined`),
 * and for trouble `facts` ([name, text, link or null]), `todo` and `command` (a route to post to).
 */
export function summarize(live) {
  const status = live.status;
  return (
    storeTrouble(status) ??
    halted(status, live.at) ??
    noEngine(status) ??
    paused(status) ??
    exhausted(status) ??
    blocked(status) ??
    working(live)
  );
}

/** Trouble beside the sentence: what is wrong while the run goes on. */
export function warnings(status) {
  const found = [];
  const engines = status.engines;
  const some = (members) => `${whole(members.length)} of ${count(engines.length, "engine")}`;
  const names = (members) => members.map((engine) => host(engine.url)).join(", ");
  const out = engines.filter((engine) => !engine.healthy);
  if (out.length && out.length < engines.length) found.push(`${some(out)} down: ${names(out)}`);
  const behind = engines.filter((engine) => engine.healthy && engine.behind);
  if (behind.length) found.push(`${some(behind)} behind, without work: ${names(behind)}`);
  if (status.threads?.stuck) {
    found.push(`${count(status.threads.stuck, "thread")} of programs do not end when told to (program.grace_s)`);
  }
  if (status.halted && status.paused) found.push("paused, too: POST /resume clears both");
  return found;
}

function storeTrouble({ store }) {
  if (store.ok) return null;
  return {
    tone: "bad",
    mark: "✕",
    headline: "STORE TROUBLE",
    sentence: "The store cannot commit, so nothing is dispatched, leased or acked.",
    facts: [["error", store.error ?? "unknown", null]],
    todo: "Make room on its disk, or make it writable again; the service goes on by itself. It need not be restarted.",
  };
}

function halted({ halted, groups }, at) {
  if (!halted) return null;
  const facts = [
    ["error", halted.error, null],
    ["group", halted.group_id, `#/groups/${halted.group_id}`],
    ["engine", halted.engine, null],
    ["since", `${clock(halted.since)}, ${duration((Date.parse(at) - Date.parse(halted.since)) / 1000)} ago`, null],
  ];
  const left = groups.ready ? ` ${count(groups.ready, "ready group")} can still be leased.` : "";
  return {
    tone: "bad",
    mark: "✕",
    headline: "HALTED",
    sentence: `${halted.reason}; nothing new is dispatched.${left}`,
    facts: facts.filter(([, text]) => text),
    todo: "Open the group, mend the cause at the engine or in the prompts, then resume. No restart is needed.",
    command: "resume",
  };
}

function noEngine({ engines, groups }) {
  if (engines.some((engine) => engine.healthy && !engine.behind && !engine.leaving)) return null;
  const some = engines.length > 0;
  const behind = some && engines.every((engine) => engine.healthy);
  return {
    tone: "bad",
    mark: "✕",
    headline: behind ? "EVERY ENGINE IS BEHIND" : "NO HEALTHY ENGINE",
    sentence: some
      ? `None of ${count(engines.length, "engine")} takes work; ${count(groups.generating, "open group")} wait for one.`
      : "The fleet is empty; rollouts wait for an engine.",
    facts: engines
      .slice(0, 3)
      .map((engine) => [host(engine.url), engine.error ?? (engine.behind ? "behind" : "down"), null]),
    todo: !some
      ? "Add one: POST /engines, or [[engines]] in the configuration and a restart."
      : behind
        ? "Each serves other weights than the run's: post the version again with its weights, or load them by hand."
        : "Start vLLM again, or read its log; nothing to do here. Rollouts wait for dispatch.engine_wait_s, then fail.",
  };
}

function paused({ paused, groups }) {
  if (!paused) return null;
  const left = groups.generating + groups.scoring;
  return {
    tone: "warn",
    mark: "‖",
    headline: "Paused",
    joined: true,
    sentence: `by an operator: no new engine requests. ${left ? `${count(left, "group")} in work end as they are; ` : ""}leases go on.`,
    command: "resume",
  };
}

function exhausted({ final, outstanding, submitted }) {
  if (!final || outstanding) return null;
  const sentence = `no more prompts will come, and all ${count(submitted, "group")} have ended.`;
  return { tone: "good", mark: "✓", headline: "Exhausted", sentence };
}

function blocked(status) {
  const { blocked: why, groups, leases, policy_version: version } = status;
  if (!why) return null;
  const wait = { tone: "wait", mark: "◔" };
  const going = groups.generating ? ` ${count(groups.generating, "group")} still generating.` : "";
  const calls = leases.waiting_calls ? "" : " No lease call waits.";
  if (why === "wait_for_version") {
    const sentence = `nothing is generated before it posts the one dispatch.wait_for_version names; now at ${version}.`;
    return { ...wait, headline: "Waiting for the trainer's version", sentence };
  }
  if (why === "pace") {
    const sentence = `as many groups are opened as it can take in time (pace); its next version opens more.${going}`;
    return { ...wait, headline: "Waiting for the trainer", sentence };
  }
  if (why === "max_ready_groups" || why === "max_ready_bytes") {
    const full = `queues are full (${why}): ${count(groups.ready, "group")} ready for a lease.`;
    return { ...wait, headline: "Waiting for the trainer", sentence: `${full}${calls}${going}` };
  }
  return { ...wait, headline: "Waiting", sentence: `no new group is opened (${why}).${going}` };
}

function working({ status, rates }) {
  const { groups, slots, leases } = status;
  const waits = leases.waiting_calls ? ` The trainer waits (${count(leases.waiting_calls, "lease call")}).` : "";
  if (slots.used || groups.generating) {
    const speed = rates?.tokens_per_s ? `, ${rate(rates.tokens_per_s).replace("/s", "")} tokens/s` : "";
    const ready = groups.ready ? `; ${whole(groups.ready)} ready for the trainer` : "";
    const work = `${count(groups.generating, "group")} on ${whole(slots.used)} of ${whole(slots.total)} slots`;
    const sentence = `${work}${speed}${ready}.${waits}`;
    return { tone: "good", mark: "►", headline: "Generating", joined: true, sentence };
  }
  if (groups.scoring) {
    return {
      tone: "good",
      mark: "►",
      headline: "Scoring",
      joined: true,
      sentence: `${count(groups.scoring, "group")}.${waits}`,
    };
  }
  if (groups.pending) {
    const sentence = `${short(groups.pending)} pending, no engine has a free place yet.${waits}`;
    return { tone: "wait", mark: "◔", headline: "About to dispatch", sentence };
  }
  if (groups.ready || groups.leased) {
    const sentence = `${count(groups.ready, "group")} ready, ${whole(groups.leased)} leased; no prompt is left to generate.`;
    return { tone: "wait", mark: "◔", headline: "Waiting for the trainer", sentence };
  }
  return { tone: "idle", mark: "◌", headline: "Idle", sentence: `no prompts: POST /prompts brings some.${waits}` };
}

/** The sentence while there is no live view. `live`: the last state known, or null. */
export function unlinked(link, live, now) {
  if (link.state === "unauthorized") {
    return {
      tone: "warn",
      mark: "◇",
      headline: "Key needed",
      sentence: `to look at this run: ${link.error}. The button Key takes one.`,
      facts: [],
    };
  }
  if (link.state === "forbidden") {
    return {
      tone: "warn",
      mark: "◇",
      headline: "Not allowed (403)",
      sentence: `${link.error} Use a key with role read, trainer or admin.`,
      facts: [],
    };
  }
  const again = Math.max(0, Math.ceil((link.retryAt - now) / 1000));
  const below = live ? " Everything below is as it was then." : "";
  return {
    tone: "bad",
    mark: "✕",
    headline: "CONNECTION LOST",
    joined: true,
    sentence:
      `to the service since ${clock(link.since, now)} (${duration((now - link.since) / 1000)}): ${link.error}. ` +
      `${again ? `Next try in ${again} s.` : "Trying now."}${below}`,
    todo: "Is the service running, and is a tunnel or proxy in between still up? The page comes back by itself.",
  };
}
