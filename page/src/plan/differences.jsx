import { PARTS } from "../parts/layout.js";
import { useText } from "../text/language.jsx";
import { atOnce, bytesWords, count, signed } from "../units.js";

const change = (before, after, written) =>
  written(before) === written(after) ? "=" : `${after > before ? "+" : "−"}${written(Math.abs(after - before))}`;

// What is missing is nothing.
const had = ({ layout }, key) => Math.max(layout[key], 0);

// Tokens a second: what a setting with more memory may cost.
function Speeds({ speeds }) {
  const t = useText();
  const rows = { one_user_tokens_per_s: t("models.speed"), all_users_tokens_per_s: t("compare.all_users") };
  return Object.entries(rows).map(([name, title]) => {
    const [before, after] = speeds.map((speed) => speed?.[name]?.estimate);
    if (before == null || after == null) return null;
    return (
      <tr key={name}>
        <td>{title}</td>
        <td class="figure">{count(before)}</td>
        <td class="figure">{count(after)}</td>
        <td class="figure">{change(before, after, count)}</td>
      </tr>
    );
  });
}

// What the second setting changes, part by part.
export function Differences({ first, second, speeds }) {
  const t = useText();
  const parts = PARTS.filter(({ key }) => first.layout[key] || second.layout[key]);
  const hundredths = (number) => number.toFixed(2);
  return (
    <section class="differences">
      <h3>{t("compare.changes")}</h3>
      <div class="scroll-x" tabIndex={0} role="region" aria-label={t("compare.changes")}>
        <table>
          <thead>
            <tr>
              <th>{t(Math.max(first.gpu.count, second.gpu.count) > 1 ? "compare.part_each" : "compare.part")}</th>
              <th class="figure">A</th>
              <th class="figure">B</th>
              <th class="figure">B − A</th>
            </tr>
          </thead>
          <tbody>
            {parts.map(({ name, key }) => (
              <tr key={key} class={`part-${name}`}>
                <td><span class="swatch" aria-hidden="true" /> {t(`part.${name}`)}</td>
                <td class="figure">{bytesWords(had(first, key))}</td>
                <td class="figure">{bytesWords(had(second, key))}</td>
                <td class="figure">{had(second, key) === had(first, key) ? "=" : signed(had(second, key) - had(first, key))}</td>
              </tr>
            ))}
            <Speeds speeds={speeds} />
            <tr>
              <td>{t("kv.tokens")}</td>
              <td class="figure">{count(first.kv.tokens)}</td>
              <td class="figure">{count(second.kv.tokens)}</td>
              <td class="figure">{change(first.kv.tokens, second.kv.tokens, count)}</td>
            </tr>
            <tr>
              <td>{t("kv.concurrency")}</td>
              <td class="figure">{hundredths(atOnce(first))}</td>
              <td class="figure">{hundredths(atOnce(second))}</td>
              <td class="figure">{change(atOnce(first), atOnce(second), hundredths)}</td>
            </tr>
          </tbody>
        </table>
      </div>
    </section>
  );
}
