// Single keys. What always holds: a key means what it means everywhere else while somebody types, while a dialog is
// open, and together with Ctrl, Alt or Meta.

const OWN_ARROWS = "[data-arrows], input, select, textarea";

/** `view()` is the view of the moment; its `keys` ({key: action}) come before `actions`. */
export function listen({ view, actions }) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.defaultPrevented) return;
    if (document.querySelector("dialog[open]")) return;
    const target = event.target;
    const typing = target.closest?.("input, select, textarea, [contenteditable]");
    if (typing) {
      if (event.key === "Escape") target.blur();
      return;
    }
    if (event.key.startsWith("Arrow") && target.closest?.(OWN_ARROWS)) return;
    const action = view()?.keys?.[event.key] ?? actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}
