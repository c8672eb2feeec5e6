// A diagnosis inside a link: what was found and what to do, and nothing of the log. It is packed, because links are short.
const bytesOf = async (stream) => new Uint8Array(await new Response(stream).arrayBuffer());

function withoutLog(answer) {
  const finding = (found) => ({
    ...found,
    evidence: found.evidence.map(({ line, id }) => ({ line, id })),
    fixes: found.fixes.slice(0, 3),
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
