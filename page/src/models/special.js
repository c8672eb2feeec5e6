// Models that do one task and are no chat: pooling models have no longest request; the others go by their name.
const TASK = /ocr|(^|[-_/])asr([-_]|$)|whisper|voxtral|speech|audio|embed|rerank/i;

export const isSpecial = (row) => !row.longest_len || TASK.test(row.name);
