import { Component, render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { flushAddress, useAddress } from "./address.js";
import { CatalogArea } from "./catalog/catalog.jsx";
import { DiagnoseArea } from "./diagnose/diagnose.jsx";
import { engine, version } from "./engine.js";
import { FragmentsArea } from "./fragments/fragments.jsx";
import { Button, ErrorNote } from "./parts/controls.jsx";
import { LiveArea } from "./live/live.jsx";
import { ModelsArea } from "./models/models.jsx";
import { PlanArea } from "./plan/plan.jsx";
import { applyTheme, keepPreference, preference } from "./preferences.js";
import { LanguageContext, preferredLanguage, translate, useText } from "./text/language.jsx";

const AREAS = {
  plan: PlanArea,
  models: ModelsArea,
  diagnose: DiagnoseArea,
  fragments: FragmentsArea,
  simulate: Later,
  live: LiveArea,
  catalog: CatalogArea,
};
// Questions about a plan, each a fold below it.
const FOLDS = ["size", "pack", "upgrade"];
const PLACES = ["plan", "models", ...FOLDS, ...Object.keys(AREAS).slice(2)];
const THEMES = ["auto", "light", "dark"];

// Simulations bring the charts along: loaded when somebody opens them.
function Later(properties) {
  const [Area, setArea] = useState(null);
  const [failed, setFailed] = useState(false);
  const t = useText();
  useEffect(() => {
    import("./simulate/simulate.jsx").then(
      (module) => setArea(() => module.SimulateArea),
      () => setFailed(true),
    );
  }, []);
  if (failed)
    return (
      <p class="note bad" role="alert">{t("error.unreachable")}</p>
    );
  return Area ? <Area {...properties} /> : <p class="soft">…</p>;
}

function App() {
  const [language, setLanguage] = useState(() => preference("language", preferredLanguage()));
  const [theme, setTheme] = useState(() => preference("theme", "auto"));
  const address = useAddress();
  const place = PLACES.includes(address.area) ? address.area : "plan";
  const area = FOLDS.includes(place) ? "plan" : place;
  const [visited, setVisited] = useState([area]);
  useEffect(() => setVisited((now) => (now.includes(area) ? now : [...now, area])), [area]);
  useEffect(() => {
    document.documentElement.lang = language;
    document.title = `${translate(language, `area.${place}`)} · legroom`;
  }, [language, place]);
  useEffect(() => scrollTo({ top: 0 }), [place]);
  useEffect(() => applyTheme(theme), [theme]);
  const pickLanguage = (next) => {
    keepPreference("language", next);
    setLanguage(next);
  };
  const pickTheme = (next) => {
    keepPreference("theme", next === "auto" ? null : next);
    setTheme(next);
  };
  return (
    <LanguageContext.Provider value={language}>
      <Header area={place} theme={theme} onTheme={pickTheme} onLanguage={pickLanguage} />
      <Progress />
      <main id="main" tabIndex={-1}>
        {address.area && place !== address.area && <p class="note fair">{translate(language, "area.unknown", { name: address.area })}</p>}
        {Object.entries(AREAS)
          .filter(([name]) => name === area || visited.includes(name))
          .map(([name, Area]) => (
            <div key={name} class="area" hidden={name !== area}>
              <Boundary>
                <Area active={name === area} fold={place} params={name === area ? address.params : null} item={name === area ? address.item : ""} />
              </Boundary>
            </div>
          ))}
      </main>
      <Footer />
    </LanguageContext.Provider>
  );
}

function Header({ area, theme, onTheme, onLanguage }) {
  const t = useText();
  const nextTheme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  const other = t.language === "en" ? "zh" : "en";
  return (
    <header class="top">
      <a
        class="skip"
        href="#main"
        onClick={(event) => {
          event.preventDefault();
          document.getElementById("main").focus();
        }}
      >
        {t("skip")}
      </a>
      <a class="brand" href="#/plan"><img src="./icon.svg" alt="" width="24" height="24" /> legroom</a>
      <nav aria-label={t("areas")}>
        {PLACES.map((name) => (
          <a key={name} href={`#/${name}`} title={t(`about.${name}`)} aria-current={name === area ? "page" : undefined}>{t(`area.${name}`)}</a>
        ))}
      </nav>
      <div class="switches">
        <button
          type="button"
          class="quiet"
          onClick={() => onTheme(nextTheme)}
          title={t("theme.switch")}
          aria-label={`${t("theme.switch")}: ${t(`theme.${theme}`)}`}
        >
          {t(`theme.${theme}`)}
        </button>
        <button type="button" class="quiet" lang={other} onClick={() => onLanguage(other)}>{other === "zh" ? "中文" : "English"}</button>
      </div>
    </header>
  );
}

// The static edition brings its engine along; the page says how far that is.
function Progress() {
  const t = useText();
  const [progress, setProgress] = useState({ ready: !engine.onProgress, share: null, error: null });
  useEffect(() => engine.onProgress?.(setProgress), []);
  if (progress.ready) return null;
  if (progress.error) return <ErrorNote error={progress.error} />;
  return (
    <div class="progress" role="status">
      <span>{t("progress.engine")}</span>
      <progress max={1} value={progress.share ?? undefined} aria-label={t("progress.engine")} />
    </div>
  );
}

function Footer() {
  const t = useText();
  return (
    <footer class="bottom">
      <p>legroom {version} · {t(engine.edition === "static" ? "footer.static" : "footer.served")}</p>
      {engine.edition !== "static" && (
        <p><a href="./openapi.json">{t("footer.api")}</a></p>
      )}
    </footer>
  );
}

class Boundary extends Component {
  state = { error: null };

  static getDerivedStateFromError(error) {
    return { error };
  }

  componentDidCatch(error) {
    console.error(error);
  }

  render() {
    return this.state.error ? (
      <Broken error={this.state.error} onAgain={() => this.setState({ error: null })} />
    ) : (
      this.props.children
    );
  }
}

function Broken({ error, onAgain }) {
  const t = useText();
  return (
    <div class="note bad" role="alert">
      <p>{t("broken", { why: error.message })}</p>
      <Button onClick={onAgain}>{t("again")}</Button>
    </div>
  );
}

addEventListener("click", flushAddress, true);
// A file dropped beside its place must not make the browser leave the page.
for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.preventDefault());
applyTheme(preference("theme", "auto"));
if (engine.edition === "static") navigator.serviceWorker?.register("sw.js").catch(() => {});
render(<App />, document.getElementById("page"));
