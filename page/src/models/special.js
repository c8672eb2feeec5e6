// Models that do one task and are no chat: pooling models, and others that go by their name.
const SCORES = /embed|rerank|^(gte|e5)-/i;
const TASK = /ocr|(^|[-_/])asr([-_]|$)|whisper|orpheus|voxtral|speech|audio/i;

// These answer in one step: there is no stream of tokens whose speed could be told.
export const generates = (row) => !row.pooling && !SCORES.test(row.name);
export const isSpecial = (row) => !generates(row) || !row.longest_len || TASK.test(row.name);
