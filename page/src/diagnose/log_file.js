// A log as the page holds it: bytes and where each line begins. Lines become text only when they are on the screen, so a
// log of 50 MB costs 50 MB and no freeze.

const NEWLINE = 10;
const PIECE = 4 * 2 ** 20;
export const MOST_SHOWN_BYTES = 512 * 2 ** 20;
const LONGEST_LINE = 4000;

export class NotALog extends Error {}

// Logs come zipped, and from PowerShell as UTF-16: both are made plain here. Anything else with zero bytes is no text.
async function plain(file) {
  const head = new Uint8Array(await file.slice(0, 65536).arrayBuffer());
  if (head[0] === 0x1f && head[1] === 0x8b) return unzipped(file);
  if (head[0] === 0xff && head[1] === 0xfe) return decoded(file, "utf-16le");
  if (head[0] === 0xfe && head[1] === 0xff) return decoded(file, "utf-16be");
  if (head.includes(0)) throw new NotALog("binary");
  return file;
}

async function decoded(file, encoding) {
  if (file.size > MOST_SHOWN_BYTES) throw new NotALog("big");
  return new Blob([new TextDecoder(encoding).decode(await file.arrayBuffer())]);
}

async function unzipped(file) {
  const pieces = [];
  let size = 0;
  try {
    for (const reader = file.stream().pipeThrough(new DecompressionStream("gzip")).getReader(); ;) {
      const { done, value } = await reader.read();
      if (done) break;
      size += value.length;
      if (size > MOST_SHOWN_BYTES) throw new NotALog("big");
      pieces.push(value);
    }
  } catch (error) {
    throw error instanceof NotALog ? error : new NotALog("binary");
  }
  return plain(new Blob(pieces));
}

const breathe = () => new Promise((resolve) => setTimeout(resolve));

// `most` is what the engine of this page can take; `onShare` hears how much of the log has been looked through.
export async function openLog(file, name = file.name ?? "", most = Infinity, { signal, onShare } = {}) {
  if (file.size > most) throw new NotALog("too_big");
  const blob = await plain(file);
  if (blob.size === 0) throw new NotALog("empty");
  if (blob.size > most) throw new NotALog("too_big");
  if (blob.size > MOST_SHOWN_BYTES) return { name, blob, size: blob.size, lines: null };
  const bytes = new Uint8Array(await blob.arrayBuffer());
  return { name, blob, size: bytes.length, lines: await lineIndex(bytes, signal, onShare) };
}

async function lineIndex(bytes, signal, onShare) {
  let starts = new Uint32Array(1024);
  let number = 1;
  for (let from = 0; from < bytes.length; from += PIECE) {
    const to = Math.min(from + PIECE, bytes.length);
    for (let at = bytes.indexOf(NEWLINE, from); at !== -1 && at < to; at = bytes.indexOf(NEWLINE, at + 1)) {
      if (at + 1 >= bytes.length) break;
      if (number === starts.length) {
        const larger = new Uint32Array(2 * number);
        larger.set(starts);
        starts = larger;
      }
      starts[number++] = at + 1;
    }
    onShare?.(to / bytes.length);
    await breathe();
    signal?.throwIfAborted();
  }
  const decoder = new TextDecoder();
  return {
    count: number,
    text(index) {
      const end = index + 1 < number ? starts[index + 1] - 1 : bytes.length;
      const long = end - starts[index] > LONGEST_LINE;
      const line = decoder.decode(bytes.subarray(starts[index], long ? starts[index] + LONGEST_LINE : end));
      return (long ? `${line} …` : line).replace(/[\r\n]+$/, "").replace(/\u001b\[[0-9;]*m/g, "");
    },
  };
}
