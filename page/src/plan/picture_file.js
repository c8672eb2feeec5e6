// The picture as a file of its own: colours written out, text as text, nothing of the page's style sheet needed.
import { certainty, partFigure, partShare } from "../parts/card.jsx";
import { scaleOf, segments } from "../parts/layout.js";
import { atOnce, commandLine, count, gib } from "../units.js";

const WIDTH = 960;
const LEFT = 32;
const BAR = WIDTH - 2 * LEFT;
const INK = "#1f2530";
const SOFT = "#5a6472";
const COLOURS = {
  weights: "#3f5f9a",
  activation: "#b0622a",
  graphs: "#77509a",
  nontorch: "#79634f",
  kv: "#2c7a58",
  outside: "#a8403d",
  others: "#6b7280",
  headroom: "#e7e9ed",
};
const VERDICTS = { fits: "#2c7a58", tight: "#8a5a00", does_not_fit: "#a8403d" };
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Noto Sans CJK SC', sans-serif";

const escaped = (text) =>
  String(text)
    .replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`)
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f]/g, "");
const text = (x, y, words, { size = 14, fill = INK, bold = false, anchor = "start" } = {}) =>
  `<text x="${x}" y="${y}" font-size="${size}" fill="${fill}" text-anchor="${anchor}"${bold ? ' font-weight="600"' : ""}>${escaped(words)}</text>`;
const box = (x, y, width, height, fill, extra = "") =>
  `<rect x="${x}" y="${y}" width="${width}" height="${height}" fill="${fill}" ${extra}/>`;

function wrapped(words, most = 112) {
  const lines = [""];
  for (const word of String(words).split(/\s+/)) {
    if ((lines.at(-1) + word).length > most) lines.push("");
    lines[lines.length - 1] += `${word} `;
  }
  return lines.map((line) => line.trimEnd());
}

export function pictureSvg(t, plan) {
  const { layout, confidence, gpu } = plan;
  const scale = scaleOf(layout);
  const at = (bytes) => LEFT + (bytes / scale) * BAR;
  const shapes = [];
  let y = 42;
  shapes.push(text(LEFT, y, t(`badge.${plan.verdict}`), { size: 20, bold: true, fill: VERDICTS[plan.verdict] }));
  for (const line of wrapped(plan.words.headline)) shapes.push(text(LEFT, (y += 24), line, { size: 15 }));
  shapes.push(text(LEFT, (y += 30), `${gpu.name} · ${gib(layout.total_bytes)}`, { fill: SOFT }));
  const top = (y += 12);
  shapes.push(box(LEFT, top, at(layout.total_bytes) - LEFT, 56, "#f3f4f6", 'rx="4" stroke="#9aa3af"'));
  for (const part of segments(layout, confidence)) {
    const width = at(part.start + part.drawn) - at(part.start);
    if (part.drawn > 0) shapes.push(box(at(part.start), top, Math.max(width, 1), 56, COLOURS[part.name]));
    if (width > 90) {
      const fill = part.name === "headroom" ? INK : "#ffffff";
      shapes.push(
        text(at(part.start) + 8, top + 24, t(`part.${part.name}`), { fill, size: 13 }),
        text(at(part.start) + 8, top + 42, gib(part.bytes, 1), { fill, size: 12 }),
      );
    }
  }
  const budget = at(Math.min(layout.budget_bytes, scale));
  shapes.push(`<path d="M${budget} ${top - 6} V${top + 68} H${LEFT}" fill="none" stroke="${INK}"/>`);
  y = top + 88;
  shapes.push(
    text(
      Math.max(budget, 320),
      y,
      t("card.budget", { gib: gib(layout.budget_bytes), ratio: plan.args.gpu_memory_utilization }),
      { anchor: "end", fill: SOFT, size: 13 },
    ),
  );
  y += 14;
  for (const part of segments(layout, confidence)) {
    y += 24;
    shapes.push(
      box(LEFT, y - 11, 12, 12, COLOURS[part.name], 'rx="2"'),
      text(LEFT + 22, y, t(`part.${part.name}`)),
      text(LEFT + 270, y, partFigure(t, part), { anchor: "end" }),
      text(LEFT + 350, y, partShare(part, layout), { anchor: "end", fill: SOFT }),
      text(LEFT + 374, y, certainty(t, part, plan), { fill: SOFT }),
    );
  }
  shapes.push(
    text(
      LEFT,
      (y += 34),
      `${t("kv.blocks")} ${count(plan.kv.num_blocks)} · ${t("kv.tokens")} ${count(plan.kv.tokens)} · ${t("kv.concurrency")} ${atOnce(plan).toFixed(2)}`,
    ),
  );
  if (plan.words.to_run.length)
    for (const line of wrapped(`$ ${commandLine(plan.words.to_run, plan.env)}`, 104))
      shapes.push(text(LEFT, (y += 24), line, { size: 13, fill: SOFT }));
  const height = y + 28;
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${WIDTH}" height="${height}" viewBox="0 0 ${WIDTH} ${height}" font-family="${FONT}">${box(0, 0, WIDTH, height, "#ffffff")}${shapes.join("")}</svg>`;
}

export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export async function picturePng(svg) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = image.naturalWidth * 2;
  canvas.height = image.naturalHeight * 2;
  const brush = canvas.getContext("2d");
  brush.scale(2, 2);
  brush.drawImage(image, 0, 0);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}
