import { useState } from "preact/hooks";
import { Button } from "./controls.jsx";
import { useText } from "../text/language.jsx";

// The column that names a row, with what stands beside the name.
export const nameColumn = (name, title, cell) => ({ name, title, isText: true, by: (row) => row[name], cell });

// A figure that sorts the rows; a row without it has a dash.
export const figureColumn = (name, title, by, cell) => ({ name, title, by, cell: (row) => (by(row) == null ? "–" : cell(by(row), row)) });

// The button that takes a row's GPUs, for the rows that hold what was asked.
export const useColumn = (title, isUsable, onUse) => ({
  name: "use",
  title,
  hidden: true,
  isText: true,
  cell: (row) =>
    isUsable(row) && (
      <Button kind="small" onClick={() => onUse(row)} aria-label={`${title}: ${row.gpu}`}>{title}</Button>
    ),
});

// A table whose columns sort it: `by` tells a column's value of a row, and what has none comes last. A narrow screen stacks
// the cells of a row, each with its column's name, and keeps the sort buttons above them.
export function SortableTable({ label, columns, rows, rowKey, rowClass }) {
  const t = useText();
  const [sort, setSort] = useState({ name: null, up: false });
  const by = columns.find(({ name }) => name === sort.name)?.by;
  const compare = (a, b) => {
    const [x, y] = [by(a) ?? null, by(b) ?? null];
    if (x === null || y === null) return (x === null) - (y === null);
    return (sort.up ? 1 : -1) * (typeof x === "string" ? x.localeCompare(y) : x - y);
  };
  const shown = by ? [...rows].sort(compare) : rows;
  const press = ({ name, isText }) => setSort((now) => ({ name, up: now.name === name ? !now.up : Boolean(isText) }));
  const direction = (name) => (sort.name !== name ? "none" : sort.up ? "ascending" : "descending");
  return (
    <div class="scroll-x" tabIndex={0} role="region" aria-label={label}>
      <table class="stacks">
        <thead>
          <tr data-title={t("table.sort")}>
            {columns.map((column) => (
              <th key={column.name} class={column.isText ? "" : "figure"} aria-sort={column.by && direction(column.name)}>
                {column.by ? (
                  <button type="button" class="sort" title={t("table.sort")} onClick={() => press(column)}>
                    {column.title}{"\u00a0"}<span aria-hidden="true">{{ none: "↕", ascending: "↑", descending: "↓" }[direction(column.name)]}</span>
                  </button>
                ) : (
                  <span class={column.hidden ? "off-screen" : ""}>{column.title}</span>
                )}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {shown.map((row) => (
            <tr key={rowKey(row)} class={rowClass?.(row)}>
              {columns.map(({ name, title, isText, hidden, cell }) => (
                <td key={name} class={isText ? "" : "figure"} data-title={hidden ? "" : title}>{cell(row)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
