// Samples as tokens coloured by logprob. What always holds: a token shows its own text only (or its id, where no
// engine can tell the text); context (mask 0) is never coloured; colour is repeated by the thickness of the line under
// the token.

import { h, setText } from "./dom.js";
import { count, decimal, whole } from "./format.js";

/** Upper ends of the classes of likelihood, most likely last. */
const CLASSES = [
  { above: -0.1, name: "≥ −0.1" },
  { above: -0.7, name: "−0.7 to −0.1" },
  { above: -1.6, name: "−1.6 to −0.7" },
  { above: -3, name: "−3 to −1.6" },
  { above: -Infinity, name: "below −3" },
];
/** Tokens drawn at once: more elements than this make a page slow. */
const PIECE = 1500;

const classOf = (logprob) => CLASSES.findIndex(({ above }) => logprob >= above);

export function legend() {
  return h(
    "div",
    { class: "legend", role: "group", "aria-label": "Legend" },
    h("span", { class: "dim", text: "logprob" }),
    CLASSES.map(({ name }, at) => h("span", { class: "token", "data-class": at, text: name })),
    h("span", { class: "token context", text: "context, not trained (mask 0)" }),
    h("span", { class: "dim", text: "↵ line end · [123] id without text · pointer or ← → read one" }),
  );
}

/** Fills `parent` with the samples of one rollout, and says there what is wrong when they cannot be had. */
export async function tokensOf(parent, ask) {
  parent.replaceChildren(h("p", { class: "dim", text: "Loading tokens…" }));
  try {
    const { samples } = await ask();
    if (!samples.length)
      parent.replaceChildren(h("p", { class: "dim", text: "No tokens: they are kept until the group has ended." }));
    else parent.replaceChildren(...samples.map((sample, at) => sampleOf(sample, at, samples.length)));
  } catch (error) {
    if (error.name !== "AbortError")
      parent.replaceChildren(h("p", { class: "why", text: `The tokens could not be loaded: ${error.message}.` }));
  }
}

function sampleOf(sample, at, all) {
  const trained = sample.completion_mask.reduce((sum, mask) => sum + mask, 0);
  const total = sample.old_log_probs.reduce((sum, logprob, i) => sum + (sample.completion_mask[i] ? logprob : 0), 0);
  const name = all > 1 ? `sample ${at + 1} of ${all}: ` : "";
  const amount = `${count(trained, "trained token")} of ${whole(sample.input_ids.length)}`;
  const about = `${name}${amount}, mean logprob ${decimal(total / Math.max(1, trained))}`;
  const readout = h("p", { class: "readout", "aria-live": "polite", text: " " });
  const flow = h("div", {
    class: "flow-of-tokens",
    tabindex: 0,
    role: "group",
    "aria-label": "tokens",
    "data-arrows": "",
  });
  const rest = h("button", { type: "button", on: { click: () => append() } });
  let drawn = 0;
  let picked = null;

  function append() {
    const end = Math.min(sample.input_ids.length, drawn + PIECE);
    const pieces = document.createDocumentFragment();
    for (; drawn < end; drawn++) pieces.append(tokenOf(sample, drawn));
    flow.append(pieces);
    const left = sample.input_ids.length - drawn;
    rest.hidden = left === 0;
    setText(rest, `Show ${whole(Math.min(PIECE, left))} more of ${whole(left)}`);
  }
  function pick(token) {
    if (!token || token === picked) return;
    picked?.removeAttribute("data-picked");
    picked = token;
    picked.setAttribute("data-picked", "");
    setText(readout, token.title);
  }
  const tokenAt = (event) => event.target.closest?.(".token");
  flow.addEventListener("pointerover", (event) => pick(tokenAt(event)));
  flow.addEventListener("click", (event) => pick(tokenAt(event)));
  flow.addEventListener("keydown", (event) => {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (!step) return;
    event.preventDefault();
    pick(picked ? picked[step] : (flow.querySelector(".token:not(.context)") ?? flow.firstElementChild));
    picked?.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  append();
  return h("div", { class: "sample" }, h("p", { class: "dim", text: about }), flow, rest, readout);
}

function tokenOf(sample, at) {
  const [id, mask, logprob] = [sample.input_ids[at], sample.completion_mask[at], sample.old_log_probs[at]];
  const text = sample.tokens?.[at] ?? null;
  const shown = text === null || text === "" ? `[${id}]` : text.replaceAll("\n", "↵\n").replaceAll("\t", "→\t");
  const quoted = text === null ? "text not known" : JSON.stringify(text);
  const how = mask ? `logprob ${decimal(logprob, 4)} (p ${decimal(Math.exp(logprob), 3)})` : "context, mask 0";
  const title = `token ${at} · id ${id} · ${how} · ${quoted}`;
  return h("span", {
    class: mask ? "token" : "token context",
    "data-class": mask ? classOf(logprob) : null,
    title,
    text: shown,
  });
}
