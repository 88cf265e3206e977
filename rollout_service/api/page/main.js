// The page: a header that says what the run is doing, and one view below it, chosen by the hash.
//
// What always holds: everything shown comes from the newest object of /events or from one call of the API; the page
// keeps that one object. Drawing waits for the browser's next frame (hidden: a second), so a burst of objects is drawn
// once.

import { askJson, storedKey, storeKey } from "./api.js";
import { h, keyed, setAttribute, setText } from "./dom.js";
import { clock, duration } from "./format.js";
import { groupView } from "./group.js";
import { groupsView } from "./groups.js";
import { listen } from "./keys.js";
import { overview } from "./overview.js";
import { openStream } from "./stream.js";
import { summarize, unlinked, warnings } from "./summary.js";

/** Older than this, the numbers are not "now": the service speaks at least every 5 s. */
const OLD_MS = 12_000;
const THEMES = ["auto", "light", "dark"];

const $ = (id) => document.getElementById(id);
const page = { live: null, at: 0, link: { state: "connecting" }, view: null, drawing: false };

// -- the header

function draw() {
  page.drawing = false;
  const now = Date.now();
  const down =
    page.link.state === "live" || page.link.state === "connecting" ? null : unlinked(page.link, page.live, now);
  const said = down ?? (page.live ? summarize(page.live) : null);
  if (said) say(said, down || !page.live ? [] : warnings(page.live.status));
  drawAge(now);
  if (page.live) page.view?.update?.(page.live);
}

function say(said, alsoWrong) {
  const now = $("now");
  setAttribute(now, "data-tone", said.tone);
  setText(now.querySelector(".mark"), said.mark);
  setText($("headline"), said.headline);
  setText($("sentence"), `${said.joined ? " " : ": "}${said.sentence}`);
  const lines = [
    ...(said.facts ?? []).map(([name, text, link]) => ({ key: `fact ${name}`, name, text, link })),
    ...(said.todo ? [{ key: "todo", name: "what to do", text: said.todo }] : []),
    ...(said.command ? [{ key: "command", name: "command", text: resumeCommand(), code: true }] : []),
    ...alsoWrong.map((text) => ({ key: text, name: "▲ warning", text, tone: "warn" })),
  ];
  keyed($("more"), lines, ({ key }) => key, makeLine);
  // Only the headline, which has no numbers: a reader of the screen hears changes, not every tick.
  const reason = said.tone === "bad" && said.facts?.length ? `: ${said.facts[0][1]}` : "";
  setText($("announce"), `${said.headline}${reason}`);
  const version = page.live ? `v${page.live.status.policy_version} · ` : "";
  document.title = `${said.mark} ${said.headline} · ${version}rollout-service`;
}

function makeLine({ name, link, code, tone }) {
  const text = link ? h("a", { href: link }) : h(code ? "code" : "span");
  const element = h("p", { class: "line", "data-tone": tone }, h("span", { class: "name", text: name }), text);
  return {
    element,
    update: (line) => {
      setText(text, line.text);
      if (line.link) setAttribute(text, "href", line.link);
    },
  };
}

function resumeCommand() {
  const key = storedKey() ? ' -H "Authorization: Bearer $ROLLOUT_SERVICE_KEY"' : "";
  return `curl -X POST${key} ${new URL("resume", document.baseURI)}`;
}

function drawAge(now) {
  const age = page.at ? now - page.at : null;
  const old = age !== null && (age > OLD_MS || page.link.state !== "live");
  const text =
    age === null
      ? ""
      : old
        ? `as of ${clock(page.at, now)}, ${duration(age / 1000)} ago`
        : `as of ${clock(page.at, now)}`;
  setText($("as-of"), text);
  setAttribute(document.body, "data-old", old ? "yes" : null);
}

function redraw() {
  if (page.drawing) return;
  page.drawing = true;
  // A hidden tab has no frames, but its title is where a halt is seen.
  if (document.hidden) setTimeout(draw, 1000);
  else requestAnimationFrame(draw);
}

// -- views

const ROUTES = [
  [/^#\/groups\/([^/?]+)$/, "groups", ([, id]) => groupView(decodeURIComponent(id), context)],
  [/^#\/groups(?:\?(.*))?$/, "groups", ([, query]) => groupsView(new URLSearchParams(query ?? ""), context)],
  [/^/, "overview", () => overview()],
];

const context = {
  /** `askJson`, with refusals of the key told to the reader. */
  ask: async (path, options) => {
    try {
      return await askJson(path, options);
    } catch (error) {
      if (error.status === 401) linked({ state: "unauthorized", error: error.message });
      throw error;
    }
  },
  live: () => page.live,
  linked: () => page.link.state === "live",
  go: (hash) => void (location.hash = hash),
};

function route(event) {
  const [found, name, make] = ROUTES.map(([pattern, ...rest]) => [pattern.exec(location.hash), ...rest]).find(
    ([m]) => m,
  );
  page.view?.leave?.();
  page.view = make(found);
  $("view").replaceChildren(page.view.element);
  for (const link of document.querySelectorAll("nav a")) {
    setAttribute(link, "aria-current", link.dataset.view === name ? "page" : null);
  }
  if (page.live) page.view.update?.(page.live);
  page.view.enter?.();
  if (event) {
    // After a click the focus would be on a link that is gone; from here Tab goes on into the view.
    if (!$("view").contains(document.activeElement)) $("view").focus({ preventScroll: true });
    if (document.activeElement === $("view")) window.scrollTo(0, 0);
  }
}

// -- key, theme, help

function linked(link) {
  page.link = link;
  const refused = link.state === "unauthorized" || link.state === "forbidden";
  if (refused || storedKey()) $("key-button").hidden = false;
  if (link.state === "unauthorized") askForKey(link.error);
  redraw();
}

function askForKey(why) {
  const dialog = $("key-dialog");
  setText($("key-why"), storedKey() ? `The key of this tab was not accepted: ${why}` : (why ?? ""));
  if (!dialog.open) dialog.showModal();
  $("key-input").focus();
}

function useKey(event) {
  event.preventDefault();
  storeKey($("key-input").value.trim());
  $("key-input").value = "";
  $("key-dialog").close();
  page.link = { state: "connecting" };
  stream.restart();
  route();
}

function theme(step) {
  const root = document.documentElement;
  const at = (THEMES.indexOf(root.dataset.theme ?? "auto") + step) % THEMES.length;
  if (at === 0) delete root.dataset.theme;
  else root.dataset.theme = THEMES[at];
  try {
    if (step) localStorage.setItem("theme", THEMES[at]);
  } catch {
    // Storage is switched off in this browser: the choice lives as long as the page.
  }
  setText($("theme-button"), `Theme: ${THEMES[at]}`);
}

$("theme-button").addEventListener("click", () => theme(1));
$("help-button").addEventListener("click", () => $("help-dialog").showModal());
$("key-button").addEventListener("click", () => askForKey("Another key for this tab:"));
$("key-form").addEventListener("submit", useKey);
theme(0);

listen({
  view: () => page.view,
  actions: {
    o: () => context.go("#/"),
    g: () => context.go("#/groups"),
    "?": () => $("help-dialog").showModal(),
    "/": () => (page.view.filter ? page.view.filter() : context.go("#/groups?focus=filter")),
    Escape: () => page.view.back && context.go(page.view.back()),
  },
});

window.addEventListener("hashchange", route);
document.addEventListener("visibilitychange", () => {
  page.drawing = false;
  redraw();
});
setInterval(redraw, 1000); // ages and countdowns
route();
const stream = openStream({
  onLive: (live) => {
    page.live = live;
    page.at = Date.now();
    redraw();
  },
  onLink: linked,
});
