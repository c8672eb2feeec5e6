// The state of the page lives in the address after #: `#/plan?model=...&gpu=h100&max_model_len=8192`, so that a link shares
// it and a reload keeps it. Nothing of it is ever sent to a server by the browser itself.
import { useEffect, useState } from "preact/hooks";

export function parseAddress(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [area = "", item = ""] = path.split("/").map(decode);
  return { area, item, params: new URLSearchParams(query) };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// A link to this very machine opens on one that runs `legroom ui` alone.
export const isLoopback = () => /^(localhost|127\.[\d.]+|\[::1\])$/.test(location.hostname);

export const addressOf = (area, params) => {
  const query = params?.toString();
  return `#/${area}${query ? `?${query}` : ""}`;
};

export function useAddress() {
  const [address, setAddress] = useState(() => parseAddress(location.hash));
  useEffect(() => {
    const listen = () => {
      dropPending();
      setAddress(parseAddress(location.hash));
    };
    addEventListener("hashchange", listen);
    return () => removeEventListener("hashchange", listen);
  }, []);
  return address;
}

// Browsers refuse an address that changes too often: the first change is written at once, a drag a few times a second.
const PAUSE_MS = 150;
let writing = 0;
let pending = null;
let written = -Infinity;
export function keepAddress(hash) {
  pending = hash;
  clearTimeout(writing);
  const rest = written + PAUSE_MS - performance.now();
  if (rest <= 0) flushAddress();
  else writing = setTimeout(flushAddress, rest);
}

export function flushAddress() {
  clearTimeout(writing);
  if (pending !== null && pending !== location.hash) {
    history.replaceState(history.state, "", pending);
    written = performance.now();
  }
  pending = null;
}
addEventListener("pagehide", flushAddress);

// Before a change that somebody may want back: the browser's Back undoes it.
export function keepStep() {
  flushAddress();
  history.pushState(history.state, "", location.hash);
}

export function dropPending() {
  clearTimeout(writing);
  pending = null;
}
