// Pages of GET /groups, which lists in order of submission. Pure but for `ask`.
//
// What always holds: a page of either order is complete: no group of the wanted states between two pages is left out.

import { sequence } from "./format.js";

export const PAGE = 50;
/** The most the service gives at once. */
const MOST = 1000;
/** Calls for one page, where groups of the wanted states are rare: about 8,000 groups are looked through. */
const MOST_CALLS = 10;

/** Oldest first, after the sequence number `after`. → {rows, next: number or null}. */
export async function oldestPage(ask, { states, after }) {
  const page = await ask("groups", { query: query(states, after, PAGE) });
  return { rows: page.groups, next: page.next === null ? null : sequence(page.next) };
}

/**
 * Newest first, below the sequence number `below` (null: from the newest, which is about `submitted`).
 *
 * The list is walked backwards in windows of numbers, wider ones while they hold too little. `next` is the `below` of
 * the next page, `looked` the lowest number seen; a page may be short where groups of these states are rare.
 */
export async function newestPage(ask, { states, below, submitted }) {
  const rows = [];
  let high = below ?? submitted + 1;
  let open = below === null; // groups submitted since are above `high`, and wanted
  let span = PAGE;
  for (let call = 0; call < MOST_CALLS && rows.length < PAGE && (high > 1 || open); call++) {
    const low = Math.max(0, high - 1 - span);
    const page = await ask("groups", { query: query(states, low, open ? MOST : span) });
    const fits = page.groups.filter(({ group_id: id }) => open || sequence(id) < high);
    rows.push(...fits.reverse());
    [high, open, span] = [low + 1, false, Math.min(MOST, span * 4)];
  }
  const shown = rows.slice(0, PAGE);
  const next = rows.length > PAGE ? sequence(shown.at(-1).group_id) : high > 1 ? high : null;
  return { rows: shown, next, looked: high };
}

const query = (states, after, limit) => ({
  ...(states.length ? { state: states.join(",") } : {}),
  ...(after > 0 ? { after: `g-${after}` } : {}),
  limit,
});
