// The fleet: one row an engine.

import { h, keyed, setAttribute, setText, setVar } from "./dom.js";
import { host, whole } from "./format.js";
import { panel } from "./panel.js";

export function engines() {
  const body = h("div", { class: "rows", role: "rowgroup" });
  const head = h(
    "div",
    { class: "row head", role: "row" },
    ["engine", "health", "load", "weights", "error"].map((text) => h("span", { role: "columnheader", text })),
  );
  return {
    element: panel(
      "engines",
      "Engines",
      h("div", { role: "table", "aria-label": "Engines" }, h("div", { role: "rowgroup" }, head), body),
    ),
    update: ({ status }) => keyed(body, status.engines, (engine) => engine.id ?? engine.url, makeEngine),
  };
}

function healthOf(engine) {
  if (engine.leaving) return ["◇", "leaving", "warn"];
  if (!engine.healthy) return ["▼", "down", "bad"];
  if (engine.behind) return ["◆", "behind", "warn"];
  return engine.doubtful ? ["◐", "doubtful", "warn"] : ["●", "healthy", "good"];
}

function why(engine) {
  if (engine.leaving) return "is being removed: takes no new work";
  if (!engine.healthy) return "";
  if (engine.behind) return "serves other weights than the run's: no work until they match";
  return engine.doubtful ? "its last requests failed: one at a time until one succeeds" : queued(engine);
}

function queued(engine) {
  const told = [];
  if (engine.waiting) told.push(`${whole(engine.waiting)} waiting there`);
  if (engine.kv_usage > 0.8) told.push(`KV cache ${whole(100 * engine.kv_usage)} % full`);
  return told.join(", ");
}

function makeEngine() {
  const cell = (...children) => h("span", { role: "cell" }, children);
  const [name, model, health, load, weights, error] = ["b", "span", "span", "span", "span", "span"].map((tag) =>
    h(tag),
  );
  model.className = "dim";
  const bar = h("span", { class: "bar-track" }, h("span", { class: "bar-fill" }));
  const cells = [cell(name, model), cell(health), cell(load, bar), cell(weights), cell(error)];
  cells[4].classList.add("engine-error");
  health.className = "badge";
  return {
    element: h("div", { class: "row", role: "row" }, cells),
    update: (engine) => {
      setText(name, host(engine.url));
      setText(model, engine.model ?? "");
      const [mark, text, tone] = healthOf(engine);
      setText(health, `${mark} ${text}`);
      setAttribute(health, "data-tone", tone);
      setText(load, `${whole(engine.in_flight)} / ${whole(engine.max_inflight)}${engine.auto ? " auto" : ""}`);
      setVar(bar, "--share", `${(100 * engine.in_flight) / Math.max(1, engine.max_inflight)}%`);
      setText(weights, engine.weight_version ? `weights ${engine.weight_version}` : "");
      setText(error, engine.error ?? why(engine));
    },
  };
}
