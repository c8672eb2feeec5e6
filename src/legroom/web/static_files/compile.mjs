// Run by node while a static page is written: the Python of browsers itself compiles what every visitor loads, because
// its bytecode is of its own version. node compile.mjs FOLDER, with the runtime, legroom.tar and compile_engine.py in it.
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const folder = path.resolve(process.argv[2]);
const at = (name) => path.join(folder, name);
const { loadPyodide } = await import(pathToFileURL(at("pyodide.mjs")).href);
const python = await loadPyodide({ indexURL: folder });
python.FS.mkdir("/build");
for (const name of ["python_stdlib.zip", "legroom.tar"]) python.FS.writeFile(`/build/${name}`, fs.readFileSync(at(name)));
python.runPython(fs.readFileSync(at("compile_engine.py"), "utf8"));
for (const name of ["python_stdlib.zip", "legroom.tar"]) fs.writeFileSync(at(name), python.FS.readFile(`/build/${name}`));
