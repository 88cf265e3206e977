// The few numbers that say how the run goes, and the sum over all groups.

import { h, setAttribute, setText, setVar } from "./dom.js";
import { duration, percent, rate, whole } from "./format.js";

export function figures() {
  const version = figure("version", "policy version");
  const slots = figure("slots", "slots used");
  const bar = h("span", { class: "bar-track" }, h("span", { class: "bar-fill" }));
  slots.element.append(bar);
  const rollouts = figure("rollouts", "rollouts");
  const speed = figure("tokens-per-s", "tokens generated");
  const groups = figure("groups-per-s", "groups delivered");
  const oldest = figure("oldest", "oldest outstanding");
  const sum = identity();
  const all = [version, slots, rollouts, speed, groups, oldest];
  return {
    element: h(
      "section",
      { class: "figures", "aria-label": "Figures" },
      all.map((f) => f.element),
      sum.element,
    ),
    update: ({ status, rates, mode }) => {
      const about = `max_staleness ${whole(status.max_staleness)}`;
      version.set(String(status.policy_version), mode === "grpo" ? about : `${about} · ${mode}`);
      slots.set(
        `${whole(status.slots.used)} / ${whole(status.slots.total)}`,
        percent(status.slots.used, status.slots.total),
      );
      setVar(bar, "--share", `${(100 * status.slots.used) / Math.max(1, status.slots.total)}%`);
      const window = rates ? `last ${duration(rates.window_s)}` : "not enough seen yet";
      rollouts.set(rates ? rate(rates.rollouts_per_s) : "–", window);
      speed.set(rates ? rate(rates.tokens_per_s) : "–", window);
      groups.set(rates ? rate(rates.groups_per_s) : "–", window);
      const group = status.oldest_outstanding;
      if (group) oldest.set(duration(group.age_s), `${group.group_id}, ${group.state}`, `#/groups/${group.group_id}`);
      else oldest.set("–", "nothing outstanding");
      sum.update(status);
    },
  };
}

function figure(name, label) {
  const value = h("span", { class: "value", "data-figure": name });
  const note = h("a", { class: "note" });
  return {
    element: h("div", { class: "figure" }, h("span", { class: "label", text: label }), value, note),
    set: (text, about, link) => {
      setText(value, text);
      setText(note, about);
      setAttribute(note, "href", link || null);
    },
  };
}

/** submitted = acked + stale + dropped + failed + outstanding, and whether it holds. */
function identity() {
  const parts = ["submitted", "acked", "stale", "dropped", "failed", "outstanding"].map((name) => ({
    name,
    value: h("b", { "data-count": name }),
  }));
  const verdict = h("span", { class: "verdict" });
  const terms = parts.map(({ name, value }, at) => [
    at === 0 ? null : h("span", { class: "sign", text: at === 1 ? "=" : "+" }),
    h("a", { class: "term", href: at === 0 ? "#/groups" : `#/groups?state=${name}` }, value, h("span", { text: name })),
  ]);
  return {
    element: h("div", { class: "identity" }, terms, verdict),
    update: ({ submitted, outstanding, groups }) => {
      const values = { ...groups, submitted, outstanding };
      for (const { name, value } of parts) setText(value, whole(values[name]));
      const adds = submitted === groups.acked + groups.stale + groups.dropped + groups.failed + outstanding;
      setText(verdict, adds ? "✓ adds up" : "✕ does not add up: please report this");
      setAttribute(verdict, "data-tone", adds ? "good" : "bad");
    },
  };
}
