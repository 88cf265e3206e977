// A titled part of a view.

import { h } from "./dom.js";

export function panel(name, title, ...children) {
  const heading = h("h2", { id: `panel-${name}`, text: title });
  return h("section", { class: `panel ${name}`, "aria-labelledby": heading.id }, heading, children);
}

/** A state or an outcome: its mark and name, so that colour only repeats what stands there. */
export function badge(text, props = {}) {
  return h("span", { class: "badge", text, ...props });
}
