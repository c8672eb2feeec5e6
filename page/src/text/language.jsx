import { createContext } from "preact";
import { useContext } from "preact/hooks";
import { DICTIONARIES } from "./dictionaries.js";

export const LanguageContext = createContext("en");

export function translate(language, key, values = {}) {
  const text = DICTIONARIES[language][key] ?? DICTIONARIES.en[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}

export function useText() {
  const language = useContext(LanguageContext);
  const t = (key, values) => translate(language, key, values);
  t.language = language;
  return t;
}

export const preferredLanguage = () => (/^zh\b/i.test(navigator.language ?? "") ? "zh" : "en");
