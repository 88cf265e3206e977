// One group opened. What always holds: an outstanding group is asked for again and again, an ended one is not; what
// was read stays when the group ends, for the service keeps no texts of ended groups.

import { makeCard } from "./card.js";
import { h, keyed, setAttribute, setText } from "./dom.js";
import { ENDED, STATES, standing } from "./explain.js";
import { host, sequence, words } from "./format.js";
import { keepFresh } from "./fresh.js";
import { listHash } from "./groups.js";
import { drawMore, drawPrompt, factsOf, makeFact } from "./standing.js";
import { legend } from "./tokens.js";

/** Kept over groups: who reads tokens of one group reads tokens of the next. */
let showTokens = false;

export function groupView(id, context) {
  const ended = new AbortController();
  const view = { group: null, at: 0, loading: false };
  const title = h("h2", { id: "group-title", text: id });
  const state = h("span", { class: "badge" });
  const means = h("p", { class: "standing" });
  const facts = h("dl", { class: "facts" });
  const why = h("p", { class: "why", role: "note" });
  why.hidden = true;
  const prompt = h("div", { class: "prompt" });
  const more = h("div", { class: "more" });
  const cards = h("div", { class: "cards" });
  const sort = h(
    "select",
    { id: "sort", on: { change: () => view.group && drawRollouts() } },
    [
      ["index", "by row"],
      ["reward", "best first"],
      ["length", "longest first"],
    ].map(([value, text]) => h("option", { value, text })),
  );
  const toggle = h("button", {
    type: "button",
    class: "tokens-toggle",
    "aria-pressed": String(showTokens),
    text: "Tokens by logprob",
    on: { click: flip },
  });
  const key = legend();
  key.hidden = true;
  const rolloutsTitle = h("h3", { text: "Rollouts" });
  const choices = [h("label", { for: "sort", text: "Sort" }), sort, toggle];
  const tools = h("div", { class: "tools" }, rolloutsTitle, h("span", { class: "grow" }), choices);
  const none = h("p", { class: "dim", text: "Nothing is kept of the rollouts of a group that has ended." });
  const known = h("div", {}, means, why, facts, h("h3", { text: "Prompt" }), prompt, more, tools, key, none, cards);
  const element = h(
    "section",
    { class: "panel group", "aria-labelledby": "group-title" },
    h(
      "div",
      { class: "group-head" },
      h("a", { href: listHash(), class: "button", text: "← Groups" }),
      title,
      state,
      h("span", { class: "grow" }),
      neighbour(-1),
      neighbour(1),
    ),
    known,
  );
  known.hidden = true;

  function neighbour(step) {
    const number = sequence(id);
    if (number === null || number + step < 1) return null;
    return h("a", { class: "button", href: `#/groups/g-${number + step}`, text: step < 0 ? "‹ previous" : "next ›" });
  }

  async function load() {
    if (view.loading) return;
    view.loading = true;
    try {
      const found = await context.ask(`groups/${encodeURIComponent(id)}`, { signal: ended.signal });
      view.group = keepTexts(found, view.group);
      view.at = performance.now();
      drawGroup();
    } catch (error) {
      if (error.name !== "AbortError" && !view.group) trouble(error);
    } finally {
      view.loading = false;
    }
  }

  function trouble(error) {
    setText(state, error.status === 404 ? "unknown" : "not loaded");
    setText(
      why,
      error.status === 404 ? `There is no group ${id}: ${error.message}.` : `It could not be loaded: ${error.message}.`,
    );
    why.hidden = false;
    element.append(why);
  }

  function drawGroup() {
    const group = view.group;
    known.hidden = false;
    if (why.parentNode !== known) known.insertBefore(why, facts);
    setText(state, `${STATES[group.state].mark} ${group.state}${group.reason ? `: ${words(group.reason)}` : ""}`);
    setAttribute(state, "data-state", group.state);
    setText(means, standing(group));
    const text = [group.error, group.engine && `engine ${host(group.engine)}`].filter(Boolean).join(" · ");
    setText(why, text);
    why.hidden = !text;
    setAttribute(why, "data-tone", ["dropped", "stale"].includes(group.state) ? "warn" : "bad");
    drawFacts();
    drawPrompt(prompt, group);
    drawMore(more, group);
    drawRollouts();
  }

  /** Ages go on between two answers, and after the last one. */
  function drawFacts() {
    keyed(facts, factsOf(view.group, (performance.now() - view.at) / 1000), ([name]) => name, makeFact);
  }

  function drawRollouts() {
    const { rollouts, state: now, attempt } = view.group;
    const kept = view.group.keptHere ? ", as last seen: the service keeps none of an ended group" : "";
    setText(rolloutsTitle, rollouts.length ? `Rollouts of attempt ${attempt}${kept}` : "Rollouts");
    const order = {
      index: (a, b) => a.index - b.index,
      reward: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.index - b.index,
      length: (a, b) => (b.tokens ?? -1) - (a.tokens ?? -1) || a.index - b.index,
    }[sort.value];
    const card = (row) =>
      makeCard(row, (index) =>
        context.ask(`groups/${encodeURIComponent(id)}/samples`, { signal: ended.signal, query: { index } }),
      );
    const extra = { attempt, tokensShown: showTokens, groupState: now, engines: context.live()?.status.engines ?? [] };
    const shown = [...rollouts].sort(order).map((row) => ({ ...row, ...extra }));
    keyed(cards, shown, (row) => `${row.attempt}.${row.index}`, card);
    const readable = rollouts.some((row) => row.state === "finished");
    for (const part of choices) part.hidden = !readable;
    key.hidden = !readable || !showTokens;
    none.hidden = rollouts.length > 0;
  }

  function flip() {
    showTokens = !showTokens;
    setAttribute(toggle, "aria-pressed", String(showTokens));
    if (view.group) drawRollouts();
  }

  const step = (by) => () => {
    const number = sequence(id);
    if (number !== null && number + by >= 1) context.go(`#/groups/g-${number + by}`);
  };
  return {
    element,
    keys: { t: flip, n: step(1), p: step(-1) },
    back: listHash,
    enter: () => {
      load();
      keepFresh(element, { linked: context.linked, wanted: () => !ENDED.includes(view.group?.state), load });
    },
    update: () => view.group && drawFacts(),
    leave: () => ended.abort(),
  };
}

/**
 * The service keeps no texts of ended groups. What the reader had before the eyes stays there, and is said to be old;
 * a smaller group that goes on under a new attempt is another matter and is shown as it is.
 */
function keepTexts(found, before) {
  if (!before || !ENDED.includes(found.state) || found.attempt !== before.attempt) return found;
  if (found.rollouts.some((row) => row.text !== null)) return found;
  const { prompt, columns, rollouts, rows, reward_errors } = before;
  return { ...found, prompt, columns, rollouts, rows, reward_errors, keptHere: rollouts.length > 0 };
}
