import { en } from "./en.js";
import { zh } from "./zh.js";

export const DICTIONARIES = { en, zh };
