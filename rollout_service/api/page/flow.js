// The states of groups with their counts, and how many passed from one to the other since this process began.
//
// What always holds: every transition that `flow` tells is drawn once: the five along the way as arrows, everything
// else as a line under the state it leaves. Each box is a link to the groups in that state.

import { h, keyed, setAttribute, setText } from "./dom.js";
import { ENDED, OUTSTANDING, STATES } from "./explain.js";
import { short, whole, words } from "./format.js";
import { panel } from "./panel.js";

const WAY = [...OUTSTANDING, "acked"];
const NEXT = new Map(OUTSTANDING.map((state, at) => [state, WAY[at + 1]]));

export function flow() {
  const boxes = new Map([...OUTSTANDING, ...ENDED].map((state) => [state, makeBox(state)]));
  const arrows = new Map(OUTSTANDING.map((state) => [state, makeArrow(state)]));
  const way = h(
    "div",
    { class: "way" },
    OUTSTANDING.map((state) => [boxes.get(state).element, arrows.get(state).element]),
  );
  const ends = h(
    "div",
    { class: "ends", role: "group", "aria-label": "ended" },
    ENDED.map((state) => boxes.get(state).element),
  );
  way.append(ends);
  const note = h("p", {
    class: "dim",
    text: "Boxes: groups now. Arrows and lines: passages since this process began.",
  });
  return {
    element: panel("flow", "Flow of groups", way, note),
    update: ({ status, flow: passages, totals }) => {
      const most = Math.max(1, ...OUTSTANDING.map((state) => status.groups[state]));
      for (const [state, box] of boxes) {
        const ways = ENDED.includes(state) ? back(passages, state) : off(passages, state);
        box.update(status.groups[state], status.groups[state] / most, state === "dropped" ? reasons(totals) : [], ways);
      }
      for (const [state, arrow] of arrows) arrow.update(passed(passages, state, NEXT.get(state)));
    },
  };
}

const passed = (passages, from, to) => passages.find((row) => row.from === from && row.to === to)?.count ?? 0;

/** What leaves the way at `state`. */
const off = (passages, state) =>
  passages.filter((row) => row.from === state && row.to !== NEXT.get(state) && row.count);

/** Ended groups opened again by a rewind. */
const back = (passages, state) => passages.filter((row) => row.from === state && row.count);

const reasons = (totals) =>
  Object.entries(totals.groups_dropped)
    .filter(([, number]) => number)
    .map(([reason, number]) => `${words(reason)} ${short(number)}`);

function makeBox(state) {
  const { mark, means } = STATES[state];
  const number = h("b", { "data-count": state });
  const box = h(
    "a",
    { class: "box", href: `#/groups?state=${state}`, title: means, "data-state": state },
    number,
    h("span", { class: "state-name", text: `${mark} ${state}` }),
  );
  const lines = h("ul", { class: "off" });
  return {
    element: h("div", { class: "stop" }, box, lines),
    update: (count, share, why, ways) => {
      setText(number, whole(count));
      setAttribute(box, "data-some", count ? "yes" : null);
      const rows = [
        ...ways.map(({ to, count: times }) => ({
          key: to,
          text: `${OUTSTANDING.includes(to) ? "↶" : "↳"} ${to} ${short(times)}`,
          to,
        })),
        ...why.map((text) => ({ key: text, text, to: null })),
      ];
      keyed(
        lines,
        rows,
        ({ key }) => key,
        ({ to }) => {
          const element = h("li", { "data-state": to });
          return { element, update: (row) => setText(element, row.text) };
        },
      );
    },
  };
}

function makeArrow(from) {
  const to = NEXT.get(from);
  const number = h("span", { "data-passed": `${from}-${to}` });
  const element = h(
    "div",
    { class: "arrow", title: `from ${from} to ${to}` },
    number,
    h("span", { class: "shaft", "aria-hidden": "true" }),
  );
  return { element, update: (times) => setText(number, short(times)) };
}
