// One rollout of an opened group. What always holds: what it wrote is shown as text, whatever it looks like.

import { h, keyed, setAttribute, setText, setVar } from "./dom.js";
import { ENDED, failure } from "./explain.js";
import { count, decimal, duration, host, signed, words } from "./format.js";
import { tokensOf } from "./tokens.js";

const MARKS = { waiting: "◌", running: "◐", finished: "✓", failed: "✕" };

export function makeCard({ index }, samplesOf) {
  const [mark, reward, advantage, rewards, finish, foot] = ["span", "span", "span", "p", "span", "p"].map((tag) =>
    h(tag),
  );
  const bar = h("span", { class: "advantage-bar", "aria-hidden": "true" });
  const error = h("p", { class: "why" });
  const text = h("pre", { class: "completion", tabindex: 0, "aria-label": `completion ${index}` });
  const tokens = h("div", { class: "completion tokens" });
  mark.className = "badge";
  const amount = h("b");
  reward.className = "reward";
  reward.append(h("span", { class: "dim", text: "reward " }), amount);
  rewards.className = "dim rewards-by-name";
  foot.className = "dim foot";
  finish.className = "badge";
  let loaded = null;
  const element = h(
    "article",
    { class: "card", "aria-label": `rollout ${index}`, "data-index": index },
    h(
      "header",
      {},
      h("span", { class: "row-number", text: `#${index}` }),
      mark,
      finish,
      h("span", { class: "grow" }),
      reward,
    ),
    h("div", { class: "advantage" }, advantage, bar),
    rewards,
    error,
    text,
    tokens,
    foot,
  );
  return {
    element,
    update: (row) => {
      setText(mark, `${MARKS[row.state] ?? ""} ${row.state}`);
      mark.hidden = row.state === "finished";
      setAttribute(mark, "data-tone", row.state === "failed" ? "bad" : "idle");
      const truncated = row.finish_reason === "length";
      setText(finish, truncated ? "⇥ length: truncated" : row.finish_reason ? `✓ ${words(row.finish_reason)}` : "");
      finish.hidden = !row.finish_reason;
      setAttribute(finish, "data-tone", truncated ? "warn" : "good");
      setText(
        amount,
        typeof row.reward === "number" ? decimal(row.reward) : Object.keys(row.rewards ?? {}).length ? "unscored" : "",
      );
      reward.hidden = !amount.textContent;
      drawAdvantage(advantage, bar, row.advantage);
      keyed(rewards, Object.entries(row.rewards ?? {}), ([name]) => name, makeReward);
      rewards.hidden = !rewards.firstChild;
      const said = [failure(row.reason), row.error].filter(Boolean);
      setText(error, said.join(" "));
      error.hidden = !said.length;
      const finished = row.state === "finished";
      const asTokens = finished && row.tokensShown && (loaded !== null || !ENDED.includes(row.groupState));
      setText(text, row.text ?? "");
      text.hidden = asTokens || !finished || row.text === null;
      tokens.hidden = !asTokens;
      if (asTokens && !loaded) loaded = tokensOf(tokens, () => samplesOf(index));
      setText(
        foot,
        [
          row.tokens !== null && count(row.tokens, "token"),
          row.in_flight_s !== null && `in flight for ${duration(row.in_flight_s)}`,
          row.attempts && count(row.attempts, "attempt"),
          row.engine && host(urlOf(row)),
        ]
          .filter(Boolean)
          .join(" · "),
      );
    },
  };
}

/** Of a finished rollout the service tells the engine's id, of a failed one its URL. */
const urlOf = ({ engine, engines }) => engines.find(({ id }) => id === engine)?.url ?? engine;

/** What one function said; a dash where it did not score. */
function makeReward() {
  const element = h("span");
  return { element, update: ([name, value]) => setText(element, `${name} ${value === null ? "–" : decimal(value)}`) };
}

/** An advantage of ±2 fills its half of the bar. */
function drawAdvantage(label, bar, advantage) {
  const known = typeof advantage === "number";
  setText(label, known ? `advantage ${signed(advantage)}` : "");
  bar.hidden = !known;
  label.parentNode.hidden = !known;
  if (!known) return;
  setVar(bar, "--share", `${Math.min(50, Math.abs(advantage) * 25)}%`);
  setAttribute(bar, "data-sign", advantage < 0 ? "minus" : "plus");
}
