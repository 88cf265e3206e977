// The whole run at a glance. What always holds: every number of a panel comes from the same object of /events.

import { rewardCurve, stalenessBars } from "./charts.js";
import { h, keyed, setText, setVar } from "./dom.js";
import { engines } from "./engines.js";
import { wasted } from "./explain.js";
import { figures } from "./figures.js";
import { flow } from "./flow.js";
import { count, percent, short, words } from "./format.js";
import { panel } from "./panel.js";
import { recent } from "./recent.js";

/** Share of the tokens from which on it is worth a word that groups only became stale. */
const MUCH = 0.1;
const PACE = 'To generate less ahead of the trainer: dispatch.admission = "pace" with groups_per_step.';

export function overview() {
  const panels = [figures(), flow(), rewards(), staleness(), engines(), recent(), tokens()];
  return {
    element: h(
      "div",
      { class: "overview" },
      panels.map((panel) => panel.element),
    ),
    update: (live) => panels.forEach((panel) => panel.update(live)),
  };
}

function staleness() {
  const chart = stalenessBars();
  const note = h("p", { class: "dim" });
  return {
    element: panel("staleness", "Staleness of delivered groups", chart.element, note),
    update: ({ staleness: rows, status, totals }) => {
      chart.update(rows, status.max_staleness);
      setText(
        note,
        `Since this process began, ${count(totals.groups_stale, "group")} lost work to a new version and ` +
          `${count(totals.aborts, "request")} were aborted at engines.`,
      );
    },
  };
}

function rewards() {
  const chart = rewardCurve();
  return {
    element: panel("rewards", "Mean reward by policy version", chart.element),
    update: (live) => chart.update(live.rewards),
  };
}

function tokens() {
  const list = h("ul", { class: "shares" });
  const waste = h("p", { class: "dim" });
  return {
    element: panel("tokens", "Tokens since this process began", list, waste),
    update: ({ totals }) => {
      const lost = Object.entries(totals.tokens_wasted).filter(([, number]) => number > 0);
      const sum = lost.reduce((all, [, number]) => all + number, 0);
      const rows = [
        { key: "generated", label: "generated", number: totals.tokens_generated, tone: "idle" },
        { key: "delivered", label: "delivered", number: totals.tokens_delivered, tone: "good" },
        ...lost
          .sort((a, b) => b[1] - a[1])
          .map(([reason, number]) => ({
            key: `wasted ${reason}`,
            label: `wasted: ${words(reason)}`,
            number,
            tone: "warn",
            title: wasted(reason),
          })),
      ];
      const most = Math.max(1, ...rows.map((row) => row.number));
      keyed(list, rows, (row) => row.key, makeShare);
      rows.forEach((row, at) => setVar(list.children[at], "--share", `${(100 * row.number) / most}%`));
      setText(
        waste,
        `${percent(sum, totals.tokens_generated)} wasted. What an aborted request had decoded is not known here.` +
          (totals.tokens_wasted.stale > MUCH * totals.tokens_generated ? ` ${PACE}` : ""),
      );
    },
  };
}

function makeShare({ label, tone, title }) {
  const number = h("b");
  const element = h(
    "li",
    { "data-tone": tone, title },
    h("span", { text: label }),
    number,
    h("span", { class: "bar-track" }, h("span", { class: "bar-fill" })),
  );
  return { element, update: (row) => setText(number, short(row.number)) };
}
