import { commandLine, gib, sureOf } from "../units.js";

// A diagnosis inside a link: what was found and what to do, and nothing of the log. It is packed, because links are short.
const bytesOf = async (stream) => new Uint8Array(await new Response(stream).arrayBuffer());

function withoutLog(answer) {
  const finding = (found) => ({
    ...found,
    evidence: found.evidence.map(({ line, id }) => ({ line, id })),
  });
  const { runs, sources, ledger, memory, ...kept } = answer;
  return { ...kept, findings: answer.findings.slice(0, 3).map(finding) };
}

export async function packed(answer) {
  const text = new Blob([JSON.stringify(withoutLog(answer))]);
  const bytes = await bytesOf(text.stream().pipeThrough(new CompressionStream("deflate-raw")));
  const letters = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  return letters.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

export async function unpacked(report) {
  const letters = atob(report.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const answer = JSON.parse(new TextDecoder().decode(await bytesOf(stream)));
  if (!Array.isArray(answer?.findings) || typeof answer.verdict !== "string") throw new Error("no report");
  return answer;
}

// What failed: model, card and release, as far as the log tells.
export const serverWords = ({ about, deployment = {} }) =>
  about ??
  [deployment.model, deployment.gpu ?? (deployment.gpu_total_bytes && gib(deployment.gpu_total_bytes)), deployment.vllm && `vLLM ${deployment.vllm}`]
    .filter((word) => typeof word === "string")
    .join(" · ");

// A diagnosis as Markdown for who has no legroom: the cause, why, and every way out; no line of the log.
export function reportText(t, answer) {
  const { headline, verdict, phase, needed = [], findings } = answer;
  const named = ({ title, cause, entry, confidence }) => `${title ?? cause} (${entry}, ${sureOf(t, confidence)})`;
  const fix = ({ command, env, comment, why, steps, trades }) => [
    comment,
    command?.length && `\`\`\`\n${commandLine(command, command[0].includes("=") ? {} : env)}\n\`\`\``,
    why,
    steps?.map((step) => `- ${step}`).join("\n"),
    trades && t("fixes.costs", { what: trades }),
  ];
  const [first] = verdict === "cause above" ? [] : findings;
  const lines = first && [...new Set(first.evidence.map(({ line }) => t("finding.line", { line })))].join(", ");
  const parts = [
    `## ${first ? named(first) : headline}`,
    [serverWords(answer), phase && t(`phase.${phase}`)].filter(Boolean).join(" — "),
    ...needed.map((each) => `- ${each}`),
    ...(first ? [first.why, ...first.fixes.flatMap(fix)] : findings.map((each) => `${named(each)}: ${each.why}`)),
    lines && `${t("finding.lines")}: ${lines}`,
    first?.verify && `${t("entry.verify")}: ${first.verify}`,
  ];
  return parts.filter(Boolean).join("\n\n");
}
