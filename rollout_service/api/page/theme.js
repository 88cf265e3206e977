// A classic script in the head, not a module: it runs before the first paint, so that no wrong theme flashes up.
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is switched off in this browser: the system's own theme it is.
}
