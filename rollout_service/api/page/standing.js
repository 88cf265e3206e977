// What is known of a group beside its rollouts: facts, prompt, columns, rewards that failed. Each is drawn anew only
// where it changed, so that a refresh disturbs nobody who reads.

import { h, setText } from "./dom.js";
import { ENDED } from "./explain.js";
import { clock, count, decimal, duration, whole } from "./format.js";

/** Name and text of each; `later`: seconds since the service told them. */
export function factsOf(group, later) {
  const sampling = Object.entries(group.sampling ?? {}).map(([name, value]) => `${name} ${JSON.stringify(value)}`);
  const rows = Object.entries(group.rows)
    .filter(([, indexes]) => indexes.length)
    .map(([state, indexes]) => `${indexes.length} ${state}`);
  const scored = group.rollouts.filter((row) => typeof row.reward === "number").map((row) => row.reward);
  const mean = scored.reduce((sum, reward) => sum + reward, 0) / scored.length;
  return [
    ["prompt", group.epoch ? `${group.prompt_id}, epoch ${group.epoch}` : group.prompt_id],
    ["policy version", group.policy_version === null ? "none yet" : String(group.policy_version)],
    ["staleness", group.staleness === null ? null : whole(group.staleness)],
    [
      "attempt",
      group.tries === group.attempt
        ? whole(group.attempt)
        : `${whole(group.attempt)} (${count(group.tries, "try").replace("trys", "tries")} counted)`,
    ],
    ["rows", `${whole(group.num_generations)}${rows.length ? `: ${rows.join(", ")}` : ""}`],
    ["mean reward", scored.length ? `${decimal(mean)} over ${whole(scored.length)}` : null],
    ["submitted", `${clock(group.submitted_at)}, ${duration(group.age_s + later)} ago`],
    [`${group.state} for`, duration(group.state_age_s + later)],
    ["lease", group.lease_id],
    ["acked by", group.acked_by],
    ["sampling", sampling.join(", ") || null],
  ].filter(([, value]) => value !== null && value !== undefined);
}

export function makeFact([name]) {
  const value = h("dd");
  return {
    element: h("div", { class: name === "sampling" ? "wide" : null }, h("dt", { text: name }), value),
    update: ([, text]) => setText(value, text),
  };
}

export function drawPrompt(parent, { prompt, state }) {
  const now = JSON.stringify(prompt);
  if (parent.drawn === now) return;
  parent.drawn = now;
  if (prompt === null) {
    const text = ENDED.includes(state) ? "Removed, as it is once a group has ended." : "Not known here.";
    parent.replaceChildren(h("p", { class: "dim", text }));
  } else if (typeof prompt === "string") {
    parent.replaceChildren(h("pre", { text: prompt, tabindex: 0 }));
  } else if (typeof prompt[0] === "number") {
    parent.replaceChildren(
      h("p", {
        class: "dim",
        text: `${count(prompt.length, "token id")}; its text is in the tokens, where the engine can tell it.`,
      }),
      h("pre", { text: prompt.join(" "), tabindex: 0 }),
    );
  } else {
    parent.replaceChildren(
      ...prompt.map((message) =>
        h(
          "div",
          { class: "message" },
          h("span", { class: "role", text: message.role ?? "?" }),
          h("pre", { text: contentOf(message) }),
        ),
      ),
    );
  }
}

/** A message's text; parts and tool calls as they stand. */
function contentOf({ role: _, content, ...others }) {
  const texts = [];
  if (typeof content === "string") texts.push(content);
  else if (Array.isArray(content)) texts.push(...content.map((part) => part.text ?? JSON.stringify(part)));
  if (Object.keys(others).length) texts.push(JSON.stringify(others, null, 1));
  return texts.join("\n");
}

export function drawMore(parent, group) {
  const columns = Object.entries(group.columns ?? {});
  const errors = Object.entries(group.reward_errors);
  const now = JSON.stringify([columns, errors]);
  if (parent.drawn === now) return;
  parent.drawn = now;
  const pairs = (entries) =>
    h(
      "dl",
      { class: "facts" },
      entries.map(([name, value]) =>
        h(
          "div",
          {},
          h("dt", { text: name }),
          h("dd", { text: typeof value === "string" ? value : JSON.stringify(value) }),
        ),
      ),
    );
  parent.replaceChildren(
    ...(columns.length
      ? [
          h(
            "details",
            { open: columns.length <= 4 },
            h("summary", { text: `Columns (${columns.length})` }),
            pairs(columns),
          ),
        ]
      : []),
    ...(errors.length
      ? [h("div", { class: "reward-errors" }, h("h3", { text: "Rewards that scored nobody" }), pairs(errors))]
      : []),
  );
}
