// The filters over the list of groups: states with their counts, and the id.

import { h, setAttribute, setText } from "./dom.js";
import { ENDED, OUTSTANDING, STATES } from "./explain.js";
import { sequence, short } from "./format.js";

const ALL = [...OUTSTANDING, ...ENDED];

/** `link(changes)`: the hash of the list with other filters. `typed()`: the number of the id in the field, or null. */
export function filterBar({ states, order, link, onTyped, onEnter }) {
  const chips = [
    chip("all", link({ state: "", at: "" }), !states.length),
    ...ALL.map((state) => {
      const others = states.includes(state) ? states.filter((one) => one !== state) : [...states, state];
      const hash = link({ state: ALL.filter((one) => others.includes(one)).join(","), at: "" });
      return chip(state, hash, states.includes(state));
    }),
  ];
  const input = h("input", {
    id: "group-filter",
    type: "search",
    placeholder: "g-42",
    autocomplete: "off",
    spellcheck: "false",
    "aria-describedby": "filter-note",
    on: { input: narrow, keydown: (event) => event.key === "Enter" && typed() !== null && onEnter(typed()) },
  });
  const note = h("span", { id: "filter-note", class: "dim" });
  const typed = () => sequence(input.value);
  const newest = order === "newest";
  const turn = h("a", {
    class: "button turn",
    href: link({ order: newest ? "oldest" : "", at: "" }),
    title: "turn the order round",
    text: newest ? "Newest first ↓" : "Oldest first ↑",
  });

  function narrow() {
    const wrong = input.value.trim() && typed() === null;
    setText(note, wrong ? "a group is called g-42, or 42" : input.value.trim() ? "Enter opens it" : "");
    setAttribute(input, "aria-invalid", wrong ? "true" : null);
    if (!wrong) onTyped();
  }

  return {
    element: h(
      "div",
      { class: "filters" },
      h(
        "div",
        { class: "chips", role: "group", "aria-label": "States" },
        chips.map(({ element }) => element),
      ),
      h("div", { class: "find" }, h("label", { for: "group-filter", text: "Group" }), input, note, turn),
    ),
    typed,
    focus: () => input.focus(),
    update: ({ status }) => {
      for (const { name, number } of chips)
        setText(number, short(name === "all" ? status.submitted : status.groups[name]));
    },
  };
}

function chip(name, href, chosen) {
  const number = h("b");
  const mark = STATES[name] ? `${STATES[name].mark} ` : "";
  const props = {
    class: "chip",
    href,
    "data-state": STATES[name] ? name : null,
    "aria-current": chosen ? "true" : null,
  };
  return { name, number, element: h("a", props, `${mark}${name} `, number) };
}
