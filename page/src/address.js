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

// Browsers refuse an address that changes too often: a drag writes it when it rests.
let writing = 0;
let pending = null;
export function keepAddress(hash) {
  pending = hash;
  clearTimeout(writing);
  writing = setTimeout(flushAddress, 250);
}

export function flushAddress() {
  clearTimeout(writing);
  if (pending !== null && pending !== location.hash) history.replaceState(history.state, "", pending);
  pending = null;
}
addEventListener("pagehide", flushAddress);

export function dropPending() {
  clearTimeout(writing);
  pending = null;
}
