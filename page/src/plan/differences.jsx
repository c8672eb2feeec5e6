import { PARTS } from "../parts/layout.js";
import { useText } from "../text/language.jsx";
import { bytesWords, count, signed } from "../units.js";

// What the second setting changes, part by part.
export function Differences({ first, second }) {
  const t = useText();
  const parts = PARTS.filter(({ key }) => first.layout[key] || second.layout[key]);
  const tokens = second.kv.tokens - first.kv.tokens;
  const requests = Number((second.kv.max_concurrency - first.kv.max_concurrency).toFixed(2));
  return (
    <section class="differences" aria-label={t("compare.changes")}>
      <h3>{t("compare.changes")}</h3>
      <div class="scroll-x" tabIndex={0} role="region" aria-label={t("compare.changes")}>
        <table>
          <thead>
            <tr>
              <th>{t("compare.part")}</th>
              <th class="figure">A</th>
              <th class="figure">B</th>
              <th class="figure">B − A</th>
            </tr>
          </thead>
          <tbody>
            {parts.map(({ name, key }) => (
              <tr key={key} class={`part-${name}`}>
                <td>
                  <span class="swatch" aria-hidden="true" /> {t(`part.${name}`)}
                </td>
                <td class="figure">{bytesWords(first.layout[key])}</td>
                <td class="figure">{bytesWords(second.layout[key])}</td>
                <td class="figure">
                  {second.layout[key] === first.layout[key] ? "=" : signed(second.layout[key] - first.layout[key])}
                </td>
              </tr>
            ))}
            <tr>
              <td>{t("kv.tokens")}</td>
              <td class="figure">{count(first.kv.tokens)}</td>
              <td class="figure">{count(second.kv.tokens)}</td>
              <td class="figure">{tokens === 0 ? "=" : `${tokens > 0 ? "+" : "−"}${count(Math.abs(tokens))}`}</td>
            </tr>
            <tr>
              <td>{t("kv.concurrency")}</td>
              <td class="figure">{first.kv.max_concurrency.toFixed(2)}</td>
              <td class="figure">{second.kv.max_concurrency.toFixed(2)}</td>
              <td class="figure">
                {requests === 0 ? "=" : `${requests > 0 ? "+" : "−"}${Math.abs(requests).toFixed(2)}`}
              </td>
            </tr>
          </tbody>
        </table>
      </div>
    </section>
  );
}
