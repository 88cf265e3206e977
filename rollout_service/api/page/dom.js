// Elements of the page. What always holds: text goes in as text. Nothing on this page parses markup, because
// completions are written by a model and errors by whatever answered; and no style attribute is set, which the page's
// CSP refuses.

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element. `props`: `text`, `on` ({event: listener}), `vars` (CSS custom properties), everything else an attribute;
 * null, undefined and false leave an attribute out. Children: nodes, texts, or null for none.
 */
export function h(tag, props = {}, ...children) {
  return build(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function svg(tag, props = {}, ...children) {
  return build(document.createElementNS(SVG, tag), props, children);
}

function build(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "on")
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "vars") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** Sets a text only where it changed: an unchanged node keeps its selection and costs no layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

export function setVar(element, name, value) {
  if (element.style.getPropertyValue(name) !== value) element.style.setProperty(name, value);
}

/**
 * Makes the children of `parent` those of `items`, in order. A child whose key was there before stays the same element,
 * so that focus and selection survive an update. `make(item)` gives `{element, update(item)}`.
 */
export function keyed(parent, items, keyOf, make) {
  const before = parent.keyedChildren ?? new Map();
  const now = new Map();
  for (const item of items) {
    const key = keyOf(item);
    const child = before.get(key) ?? make(item);
    child.update?.(item);
    now.set(key, child);
  }
  for (const [key, child] of before) if (now.get(key) !== child) child.element.remove();
  let at = parent.firstChild;
  for (const { element } of now.values()) {
    if (element === at) at = at.nextSibling;
    else parent.insertBefore(element, at);
  }
  parent.keyedChildren = now;
}
