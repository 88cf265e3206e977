// Numbers, times and names for people. Pure: "now" is an argument.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const STEPS = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

/** 1234567 → "1,234,567". */
export const whole = (value) => WHOLE.format(value);

/** Exact below 10,000, then three figures: "12.3k", "4.56M". */
export function short(value) {
  if (Math.abs(value) < 9999.5) return whole(value);
  const [size, unit] = STEPS.find(([step]) => Math.abs(value) >= step * 0.9995) ?? STEPS.at(-1);
  return figures(value / size) + unit;
}

/** A rate: "0.25/s", "12.3k/s". */
export function rate(value) {
  if (Math.abs(value) >= 999.5) return `${short(value >= 9999.5 ? value : Math.round(value))}/s`;
  return `${value === 0 ? "0" : figures(value)}/s`;
}

function figures(value) {
  const size = Math.abs(value);
  return value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

/** A reward, an advantage, a logprob: three decimals, "−" for minus, and "−0.000" never. */
export function decimal(value, digits = 3) {
  const text = Math.abs(value).toFixed(digits);
  return value < 0 && Number(text) !== 0 ? `−${text}` : text;
}

/** With its sign, as advantages are read. */
export const signed = (value) => (value > 0 && Number(value.toFixed(3)) !== 0 ? "+" : "") + decimal(value);

/** "37 %"; "< 1 %" where rounding would say none, "> 99 %" where it would say all. */
export function percent(part, all) {
  if (!all) return "0 %";
  const share = (100 * part) / all;
  if (share > 0 && share < 1) return "< 1 %";
  return share < 100 && share > 99 ? "> 99 %" : `${Math.round(share)} %`;
}

/** Seconds as "0.4 s", "12 s", "3 m 12 s", "2 h 05 m", "3 d 4 h". */
export function duration(seconds) {
  if (seconds < 9.95) return `${Math.max(0, seconds).toFixed(1)} s`;
  const all = Math.round(seconds);
  if (all < 60) return `${all} s`;
  if (all < 3600) return `${Math.floor(all / 60)} m ${all % 60} s`;
  if (all < 86400) return `${Math.floor(all / 3600)} h ${String(Math.floor((all % 3600) / 60)).padStart(2, "0")} m`;
  return `${Math.floor(all / 86400)} d ${Math.floor((all % 86400) / 3600)} h`;
}

/** Time of day in the reader's zone, with the date where it is another one. */
export function clock(moment, now = Date.now()) {
  const date = new Date(moment);
  const time = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date(now).toDateString() ? time : `${date.toLocaleDateString("en-CA")} ${time}`;
}

/** "1 group", "2 groups". */
export const count = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

/** "too_few_survivors" → "too few survivors". */
export const words = (name) => String(name).replaceAll("_", " ");

/** The part of an engine's URL that tells it from others. */
export const host = (url) =>
  String(url)
    .replace(/^https?:\/\//, "")
    .replace(/\/$/, "");

/** Number of "g-42", or null. Digits alone are taken too. */
export function sequence(groupId) {
  const found = /^\s*(?:g-)?(\d{1,15})\s*$/i.exec(groupId ?? "");
  return found ? Number(found[1]) : null;
}
