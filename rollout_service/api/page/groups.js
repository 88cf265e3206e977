// The list of groups. What always holds: its hash says it all (states, order, place), so that a link shows the same
// and the browser's back works; a refresh moves neither focus nor scroll.

import { h, keyed, setAttribute, setText } from "./dom.js";
import { ENDED, OUTSTANDING, STATES } from "./explain.js";
import { filterBar } from "./filters.js";
import { duration, host, sequence, whole, words } from "./format.js";
import { keepFresh } from "./fresh.js";
import { newestPage, oldestPage } from "./pages.js";

const ALL = [...OUTSTANDING, ...ENDED];
const COLUMNS = ["group", "state", "prompt", "version", "staleness", "attempt", "for", "why"];

/** The group opened last: going back puts the focus on it. */
let opened = null;
/** The list last seen, with its filters and place. */
let lastHash = "#/groups";

export const listHash = () => lastHash;

export function groupsView(params, context) {
  const wanted = new Set(
    (params.get("state") ?? "")
      .split(",")
      .flatMap((name) => (name === "outstanding" ? OUTSTANDING : [name]))
      .filter((name) => ALL.includes(name)),
  );
  const states = ALL.filter((state) => wanted.has(state));
  const order = params.get("order") === "oldest" ? "oldest" : "newest";
  const at = sequence(params.get("at"));
  const view = { counts: "", ended: new AbortController(), loading: false };

  const link = (changes) => {
    const merged = {
      state: states.join(","),
      order: order === "oldest" ? "oldest" : "",
      at: at === null ? "" : `g-${at}`,
      ...changes,
    };
    const query = Object.entries(merged)
      .filter(([, value]) => value)
      .map(([key, value]) => `${key}=${value}`)
      .join("&");
    return `#/groups${query ? `?${query}` : ""}`;
  };

  const filters = filterBar({
    states,
    order,
    link,
    onTyped: () => load(),
    onEnter: (id) => context.go(`#/groups/g-${id}`),
  });

  // -- the table

  const head = h(
    "div",
    { class: "row head", role: "row" },
    COLUMNS.map((text) => h("span", { role: "columnheader", text })),
  );
  const body = h("div", { class: "rows", role: "rowgroup" });
  const table = h(
    "div",
    { class: "groups-table", role: "table", "aria-label": "Groups" },
    h("div", { role: "rowgroup" }, head),
    body,
  );
  const empty = h("p", { class: "dim empty", text: "Loading…" });
  const start = h("a", { class: "button", href: link({ at: "" }), text: order === "newest" ? "⇤ Newest" : "⇤ Oldest" });
  const next = h("a", { class: "button", text: order === "newest" ? "Older →" : "Newer →" });
  start.hidden = at === null;
  next.hidden = true;
  const pager = h("nav", { class: "pager", "aria-label": "Pages" }, start, next);
  const element = h(
    "section",
    { class: "panel groups", "aria-labelledby": "groups-title" },
    h("h2", { id: "groups-title", text: "Groups" }),
    filters.element,
    table,
    empty,
    pager,
  );

  // -- what is asked

  async function load() {
    if (view.loading) return;
    view.loading = true;
    const typed = filters.typed();
    const place = typed !== null ? (order === "newest" ? typed + 1 : typed - 1) : at;
    const ask = (path, options) => context.ask(path, { ...options, signal: view.ended.signal });
    try {
      const submitted = context.live()?.status.submitted ?? (await ask("status")).submitted;
      const page =
        order === "newest"
          ? await newestPage(ask, { states, below: place, submitted })
          : await oldestPage(ask, { states, after: place ?? 0 });
      show(page, typed);
    } catch (error) {
      if (error.name !== "AbortError") tell(`The list could not be loaded: ${error.message}.`);
      view.counts = ""; // asked again soon
    } finally {
      view.loading = false;
      if (filters.typed() !== typed && !view.ended.signal.aborted) load();
    }
  }

  function show(page, typed) {
    keyed(body, page.rows, (row) => row.group_id, makeRow);
    table.hidden = page.rows.length === 0;
    const which = states.length ? `group that is ${states.join(" or ")}` : "group";
    const where = typed === null && at === null ? "" : " here";
    const back = page.looked > 1 ? `; looked back to g-${whole(page.looked)}` : "";
    tell(page.rows.length ? "" : `No ${which}${where}${back}.`);
    next.hidden = page.next === null;
    if (page.next !== null) setAttribute(next, "href", link({ at: `g-${page.next}` }));
    if (opened) {
      body.keyedChildren.get(opened)?.focus();
      opened = null;
    }
  }

  const tell = (text) => {
    setText(empty, text);
    empty.hidden = !text;
  };

  /** Whether a group has moved since this was asked last. */
  function changed() {
    const counts = JSON.stringify(context.live()?.status.groups ?? null);
    const other = counts !== view.counts;
    view.counts = counts;
    return other;
  }

  // -- keys

  function move(step) {
    const links = [...body.querySelectorAll("a.open")];
    if (!links.length) return;
    const here = links.findIndex((one) => one.closest(".row").contains(document.activeElement));
    links[here < 0 ? (step > 0 ? 0 : links.length - 1) : Math.min(links.length - 1, Math.max(0, here + step))].focus();
  }
  const down = () => move(1);
  const up = () => move(-1);

  return {
    element,
    keys: {
      j: down,
      k: up,
      ArrowDown: down,
      ArrowUp: up,
      n: () => next.hidden || context.go(next.getAttribute("href")),
      p: () => at !== null && history.back(),
    },
    filter: filters.focus,
    back: () => "#/",
    enter: () => {
      lastHash = link({});
      load();
      if (params.get("focus") === "filter") filters.focus();
      keepFresh(element, { linked: context.linked, wanted: changed, load });
    },
    leave: () => {
      view.ended.abort();
      opened = body.contains(document.activeElement) ? document.activeElement.dataset.group : null;
    },
    update: filters.update,
  };
}

function makeRow({ group_id: id }) {
  const open = h("a", { class: "open", href: `#/groups/${id}`, text: id, "data-group": id });
  const badge = h("span", { class: "badge" });
  const [prompt, version, stale, attempt, age, reason] = COLUMNS.slice(2).map((name) =>
    h("span", { role: "cell", "data-label": name }),
  );
  const element = h(
    "div",
    { class: "row", role: "row" },
    h("span", { role: "cell" }, open),
    h("span", { role: "cell" }, badge),
    prompt,
    version,
    stale,
    attempt,
    age,
    reason,
  );
  element.addEventListener("click", (event) => {
    if (!event.target.closest("a") && !String(getSelection())) open.click();
  });
  return {
    element,
    focus: () => open.focus(),
    update: (row) => {
      setText(badge, `${STATES[row.state].mark} ${row.state}`);
      setAttribute(badge, "data-state", row.state);
      setText(prompt, row.epoch ? `${row.prompt_id} · epoch ${row.epoch}` : row.prompt_id);
      setAttribute(prompt, "title", row.prompt_id);
      setText(version, row.policy_version === null ? "–" : `v${row.policy_version}`);
      setText(stale, row.staleness === null ? "–" : whole(row.staleness));
      setText(attempt, whole(row.attempt));
      setText(age, duration(row.state_age_s));
      setAttribute(age, "title", `in this state; submitted ${duration(row.age_s)} ago`);
      const why = [row.reason && words(row.reason), row.error, row.engine && row.error && host(row.engine)].filter(
        Boolean,
      );
      setText(reason, why.join(" · "));
      setAttribute(reason, "title", row.error);
    },
  };
}
