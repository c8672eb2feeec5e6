import terms from "../../../src/legroom/facts/data/plan_terms.json" with { type: "json" };
import { en } from "./en.js";
import { zh } from "./zh.js";

const meanings = (language) => Object.fromEntries(Object.entries(terms).map(([name, term]) => [`part.${name}.what`, term[language]]));

export const DICTIONARIES = { en: { ...en, ...meanings("en") }, zh: { ...zh, ...meanings("zh") } };
