// Views that ask again and again. What always holds: nobody asks for a view that has gone, in a hidden tab or without
// a connection, and asking takes at most a fifth of the time, however slow the answers are.

const EVERY_MS = 2000;
const SHARE = 4;

/** Calls `load` (async, never raises) while `element` is on the page; `wanted()` may say that nothing can be new. */
export function keepFresh(element, { linked, wanted, load }) {
  async function again(wait) {
    await new Promise((done) => setTimeout(done, wait));
    if (!element.isConnected) return;
    const began = performance.now();
    if (!document.hidden && linked() && wanted()) await load();
    again(Math.max(EVERY_MS, SHARE * (performance.now() - began)));
  }
  again(EVERY_MS);
}
