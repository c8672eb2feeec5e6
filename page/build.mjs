// Builds the page into DIR (bin/build-page gives src/legroom/web/page): the same sources give the same bytes.
import { build } from "esbuild";
import { cp, mkdir, readFile, rm, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2];
if (!out) throw new Error("usage: node build.mjs DIR");

await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });

const shared = {
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  charset: "utf8",
  legalComments: "none",
  absWorkingDir: here,
  jsx: "automatic",
  jsxImportSource: "preact",
  logLevel: "warning",
};
await build({
  ...shared,
  entryPoints: { app: "src/main.jsx" },
  outdir: out,
  splitting: true,
  chunkNames: "[name]-[hash]",
});
await build({ ...shared, entryPoints: { app: "src/style/app.css" }, outdir: out });
await cp(join(here, "src/index.html"), join(out, "index.html"));
await cp(join(here, "src/icon.svg"), join(out, "icon.svg"));

const licences = [];
for (const name of ["preact", "uplot"]) {
  const about = JSON.parse(await readFile(join(here, "node_modules", name, "package.json"), "utf8"));
  const text = await readFile(join(here, "node_modules", name, "LICENSE"), "utf8");
  licences.push(`${about.name} ${about.version}, ${about.license}\n\n${text.trim()}\n`);
}
await writeFile(
  join(out, "LICENSES.txt"),
  `app.js and the files beside it contain these libraries.\n\n${licences.join("\n----\n\n")}`,
);
