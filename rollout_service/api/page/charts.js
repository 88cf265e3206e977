// Two drawings. What always holds: each says in words what it shows, and no value is to be had from colour alone.

import { h, keyed, setAttribute, setText, setVar, svg } from "./dom.js";
import { count, decimal, percent, short } from "./format.js";

/** Beyond so many bars a column each is no longer readable; the oldest share one. */
const MOST_BARS = 12;

/** Delivered groups by staleness, 0 to S. */
export function stalenessBars() {
  const element = h("ul", { class: "bars" });
  return {
    element,
    update: (rows, most) => {
      const groups = new Map(rows.map((row) => [row.staleness, row.groups]));
      const last = Math.max(most, ...groups.keys());
      const bars = Array.from({ length: Math.min(last + 1, MOST_BARS) }, (_, at) => ({
        name: String(at),
        number: groups.get(at) ?? 0,
      }));
      if (last >= MOST_BARS) {
        const rest = [...groups].filter(([staleness]) => staleness >= MOST_BARS - 1);
        bars[MOST_BARS - 1] = { name: `${MOST_BARS - 1}–${last}`, number: rest.reduce((sum, [, n]) => sum + n, 0) };
      }
      const all = bars.reduce((sum, bar) => sum + bar.number, 0);
      const top = Math.max(1, ...bars.map((bar) => bar.number));
      keyed(element, bars, (bar) => bar.name, makeBar);
      bars.forEach((bar, at) => {
        const item = element.children[at];
        setVar(item, "--share", `${(100 * bar.number) / top}%`);
        setAttribute(
          item,
          "title",
          `staleness ${bar.name}: ${count(bar.number, "group")}, ${percent(bar.number, all)}`,
        );
      });
    },
  };
}

function makeBar({ name }) {
  const number = h("b", { "data-staleness": name });
  const element = h(
    "li",
    {},
    number,
    h("span", { class: "column", "aria-hidden": "true" }),
    h("span", { class: "bar-name", text: name }),
  );
  return { element, update: (bar) => setText(number, short(bar.number)) };
}

const HEIGHT = 230;
const EDGE = { left: 52, right: 14, top: 14, bottom: 30 };

/** Mean reward over policy versions; the pointer or the arrow keys read one off. */
export function rewardCurve() {
  const drawing = svg("svg", { height: HEIGHT, class: "curve", role: "img", tabindex: 0, "data-arrows": "" });
  const readout = h("p", { class: "dim readout", "aria-live": "polite" });
  let rows = [];
  let points = [];
  let picked = null; // a policy version, so that the choice stays with it while the curve grows
  let drawn = "";

  function pick(index) {
    const point = points[Math.min(points.length - 1, Math.max(0, index))];
    picked = point?.version ?? null;
    mark();
  }
  function mark() {
    const point = points.find(({ version }) => version === picked) ?? points.at(-1);
    drawing.querySelector(".picked")?.remove();
    if (!point) return;
    if (point.version === picked) {
      drawing.append(
        svg(
          "g",
          { class: "picked" },
          svg("line", { x1: point.x, x2: point.x, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }),
          svg("circle", { cx: point.x, cy: point.y, r: 5 }),
        ),
      );
    }
    setText(readout, `version ${point.version}: mean ${decimal(point.mean)} over ${count(point.groups, "group")}`);
  }
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = event.clientX - box.left;
    const near = points.reduce(
      (best, point, at) => (Math.abs(point.x - x) < Math.abs(points[best].x - x) ? at : best),
      0,
    );
    pick(near);
  });
  drawing.addEventListener("pointerleave", () => {
    picked = null;
    mark();
  });
  drawing.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = points.findIndex(({ version }) => version === picked);
    pick((at < 0 ? points.length - 1 : at) + step);
  });
  function redraw() {
    const width = drawing.clientWidth || 640;
    const now = JSON.stringify([width, rows]);
    if (now === drawn) return;
    drawn = now;
    points = draw(drawing, rows, width);
    if (!points.length) setText(readout, "No group with a reward was delivered yet.");
    mark();
  }
  new ResizeObserver(redraw).observe(drawing);
  return {
    element: h("div", { class: "chart" }, drawing, readout),
    update: (found) => {
      rows = found.filter((row) => row.mean !== null && Number.isFinite(row.mean));
      redraw();
    },
  };
}

/** Draws `rows` ({policy_version, groups, mean}) `width` pixels wide and gives the points with their places. */
function draw(drawing, rows, width) {
  const versions = rows.map((row) => row.policy_version);
  const means = rows.map((row) => row.mean);
  const [low, high, step] = scale(Math.min(...means), Math.max(...means));
  const [first, last] = [Math.min(...versions), Math.max(...versions)];
  const x = (version) => EDGE.left + ((width - EDGE.left - EDGE.right) * (version - first)) / Math.max(1, last - first);
  const y = (mean) => HEIGHT - EDGE.bottom - ((HEIGHT - EDGE.top - EDGE.bottom) * (mean - low)) / (high - low);
  const points = rows.map((row) => ({
    version: row.policy_version,
    groups: row.groups,
    mean: row.mean,
    x: x(row.policy_version),
    y: y(row.mean),
  }));
  const parts = [];
  if (rows.length) {
    const digits =
      [0, 1, 2, 3, 4, 5].find((places) => Math.abs(step * 10 ** places - Math.round(step * 10 ** places)) < 1e-6) ?? 6;
    for (let at = 0; low + at * step <= high + step / 2; at++) {
      const value = low + at * step;
      parts.push(svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }));
      parts.push(
        svg("text", { x: EDGE.left - 8, y: y(value) + 4, "text-anchor": "end", text: decimal(value, digits) }),
      );
    }
    for (const version of new Set([first, Math.round((first + last) / 2), last])) {
      const anchor = version === last && last > first ? "end" : version === first ? "start" : "middle";
      parts.push(svg("text", { x: x(version), y: HEIGHT - 8, "text-anchor": anchor, text: `v${version}` }));
    }
    parts.push(
      svg("polyline", { class: "line", points: points.map((p) => `${p.x.toFixed(1)},${p.y.toFixed(1)}`).join(" ") }),
    );
    if (points.length <= 60)
      parts.push(...points.map((p) => svg("circle", { class: "dot", cx: p.x, cy: p.y, r: 2.5 })));
  }
  drawing.replaceChildren(...parts);
  setAttribute(
    drawing,
    "aria-label",
    rows.length
      ? `Mean reward ${decimal(means[0])} at version ${first}, ${decimal(means.at(-1))} at version ${last}; arrow keys read it.`
      : "No rewards yet.",
  );
  return points;
}

/** Bounds and step of an axis with 3 to 6 round values. */
function scale(low, high) {
  if (!Number.isFinite(low)) return [0, 1, 0.5];
  if (high - low < 1e-9) [low, high] = [low - 0.5, high + 0.5];
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((found) => found >= rough);
  return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step, step];
}
