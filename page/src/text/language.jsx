import { createContext } from "preact";
import { useContext } from "preact/hooks";
import { en } from "./en.js";
import { zh } from "./zh.js";

const DICTIONARIES = { en, zh };
export const LanguageContext = createContext("en");

export function translate(language, key, values = {}) {
  const text = DICTIONARIES[language][key] ?? en[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}

export function useText() {
  const language = useContext(LanguageContext);
  const t = (key, values) => translate(language, key, values);
  t.language = language;
  return t;
}

export const preferredLanguage = () => (/^zh\b/i.test(navigator.language ?? "") ? "zh" : "en");
