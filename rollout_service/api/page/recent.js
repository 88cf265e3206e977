// What happened last. What always holds: an entry that is still there stays the same element, so that a text somebody
// is selecting is not pulled away; events that differ only in their group stand in one entry, so that one version that
// made forty groups stale does not hide an error.

import { h, keyed, setText } from "./dom.js";
import { clock, host, words } from "./format.js";
import { panel } from "./panel.js";

/** Of the recent events, what is no trouble: shown on demand, so that versions do not push errors off the page. */
const QUIET = new Set(["version", "engine_up", "store_up"]);
const KINDS = {
  halted: ["✕", "bad"],
  group_failed: ["✕", "bad"],
  rollout_failed: ["✕", "bad"],
  engine_down: ["▼", "bad"],
  engine_up: ["▲", "good"],
  store_down: ["▪", "bad"],
  store_up: ["▪", "good"],
  group_dropped: ["⊘", "warn"],
  group_stale: ["◷", "warn"],
  version: ["↑", "idle"],
};

/** Links to groups of one entry; of more, only the number is told. */
const LINKS = 3;

export function recent() {
  const list = h("ol", { class: "recent-list" });
  const none = h("p", { class: "dim", text: "Nothing went wrong since this process began." });
  const all = h("input", { type: "checkbox", on: { change: () => last && update(last) } });
  let last = null;
  function update(live) {
    last = live;
    const entries = together(live.recent.filter(({ kind }) => all.checked || !QUIET.has(kind)));
    keyed(list, entries, ({ key }) => key, makeEntry);
    none.hidden = entries.length > 0;
  }
  const toggle = h("label", { class: "toggle" }, all, "versions and recoveries too");
  return { element: panel("recent", "Recent halts and errors", toggle, none, list), update };
}

/** Neighbours of one kind, engine and text as one entry, at the time of the newest. */
function together(events) {
  const entries = [];
  const seen = new Map();
  for (const { group_id: group, ...event } of events) {
    const same = [event.kind, event.engine, event.text].join(" ");
    if (entries.at(-1)?.same === same) {
      entries.at(-1).groups.push(group);
      continue;
    }
    // The oldest of an entry falls off the end at some time, its newest stays: the key is made of that.
    const base = `${event.at} ${group} ${same}`;
    seen.set(base, (seen.get(base) ?? 0) + 1);
    entries.push({ ...event, same, groups: [group], key: `${base} ${seen.get(base)}` });
  }
  return entries;
}

function makeEntry({ at, kind, engine, text }) {
  const [mark, tone] = KINDS[kind] ?? ["·", "idle"];
  const links = h("span");
  const more = h("span", { class: "dim" });
  const first = engine && kind.startsWith("engine");
  const element = h(
    "li",
    { "data-kind": kind },
    h("time", { datetime: at, title: at, text: clock(at) }),
    h("span", { class: "badge", "data-tone": tone, text: `${mark} ${words(kind)}` }),
    h(
      "span",
      { class: "what" },
      links,
      more,
      first ? [h("b", { text: host(engine) }), " "] : null,
      h("span", { class: "event-text", text }),
      engine && !first && !text.includes(engine) ? h("span", { class: "dim", text: ` ${host(engine)}` }) : null,
    ),
  );
  return {
    element,
    update: ({ groups }) => {
      const known = [...new Set(groups)].filter((group) => group !== null);
      keyed(
        links,
        known.slice(0, LINKS),
        (group) => group,
        (group) => ({ element: h("span", {}, h("a", { href: `#/groups/${group}`, text: group }), " ") }),
      );
      const times = groups.length > known.length && known.length ? `${groups.length} times ` : "";
      setText(more, known.length > LINKS ? `and ${known.length - LINKS} more ` : times);
    },
  };
}
