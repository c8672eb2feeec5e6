// Theme and language stay in this browser; where storage is forbidden they last as long as the page.
export function preference(name, fallback) {
  try {
    return localStorage.getItem(`legroom.${name}`) ?? fallback;
  } catch {
    return fallback;
  }
}

export function keepPreference(name, value) {
  try {
    if (value === null) localStorage.removeItem(`legroom.${name}`);
    else localStorage.setItem(`legroom.${name}`, value);
  } catch {
    // Private windows may forbid it.
  }
}

export function applyTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  dispatchEvent(new Event("legroom-theme"));
}
