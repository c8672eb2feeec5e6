import { useEffect, useRef, useState } from "preact/hooks";
import { addressOf, flushAddress, isLoopback, keepAddress } from "../address.js";
import { Button, CopyButton, ErrorNote, Status, Tabs } from "../parts/controls.jsx";
import { scaleOf } from "../parts/layout.js";
import { faultIn } from "../limits.js";
import { EMPTY, fromParams, isExample, toParams } from "../setup.js";
import { useText } from "../text/language.jsx";
import { Differences } from "./differences.jsx";
import { Flags } from "./flags.jsx";
import { Holders } from "./holders.jsx";
import { Pack, Upgrade, useFirstPacked } from "./more.jsx";
import { picturePng, pictureSvg, save } from "./picture_file.js";
import { Result, Strip } from "./result.jsx";
import { Source, useLists } from "./source.jsx";
import { Wishes } from "./wishes.jsx";
import { lastSetup } from "../last_setup.js";
import { usePlan } from "./use_plan.js";

const addressFor = (first, second, place) =>
  addressOf(place, second ? toParams(second, "b.", toParams(first)) : toParams(first));

// A wrong input has no plan, and never the one before it; a server that does not answer leaves the last one greyed.
const answerTo = (asked, refused) => {
  const error = refused ?? asked.error;
  return error && error.exitCode !== 3 ? { ...asked, error, plan: null, last: asked.plan } : asked;
};

const setupsOf = (params) => ({ a: fromParams(params) ?? EMPTY, b: fromParams(params, "b.") });

export function PlanArea({ params, active, fold }) {
  const t = useText();
  const lists = useLists();
  const [setups, setSetups] = useState(() => setupsOf(params));
  const [side, setSide] = useState("a");
  // A link that was followed or a step back in the history: what the address says is what is shown.
  useEffect(() => {
    if (!params?.size) return;
    setRefused({});
    setSetups(setupsOf(params));
  }, [params]);
  useEffect(() => {
    lastSetup.current = setups.a;
    if (active) keepAddress(addressFor(setups.a, setups.b, fold));
  }, [setups, active, fold]);
  const [refused, setRefused] = useState({});
  const unasked = (setup) => setup && faultIn(t, setup);
  const planA = answerTo(usePlan(setups.a), refused.a ?? unasked(setups.a));
  const planB = answerTo(usePlan(setups.b), refused.b ?? unasked(setups.b));
  const packed = useFirstPacked(fold === "pack" ? setups.a : null);
  const alone = answerTo(usePlan(packed?.setup), packed?.error);
  const draft = useRef(null);
  const editing = setups.b ? side : "a";
  const change = (which) => (setup) => {
    setRefused({});
    setSetups((now) => ({ ...now, [which]: setup }));
  };
  const shown = editing === "b" ? planB : planA;
  const both = setups.b && planA.plan && planB.plan;
  const scale = both ? Math.max(scaleOf(planA.plan.layout), scaleOf(planB.plan.layout)) : undefined;
  const compare = () => {
    setSide("b");
    setSetups((now) => ({ ...now, b: now.b ? null : { ...now.a, flags: { ...now.a.flags } } }));
    scrollTo({ top: 0 });
  };
  return (
    <div class={`plan-area${setups.b ? " comparing" : ""}`}>
      <div class="inputs">
        {setups.b && (
          <Tabs
            label={t("compare.edit")}
            value={editing}
            onPick={setSide}
            tabs={[
              { value: "a", label: t("compare.a") },
              { value: "b", label: t("compare.b") },
            ]}
          />
        )}
        <ErrorNote error={lists.error} />
        <Unread parts={setups[editing].unread} />
        <Chosen setup={setups[editing]} />
        {!setups.b && isExample(setups.a) && (
          <p class="soft">{t("plan.example")}</p>
        )}
        <Source
          key={editing}
          setup={setups[editing]}
          onChange={change(editing)}
          onRefused={(error) => setRefused({ [editing]: error })}
          lists={lists}
          error={shown.error}
          draft={draft}
        />
        <Wishes setup={setups[editing]} onChange={change(editing)} draft={draft} />
      </div>
      <div class="results">
        <div class="sides">
          {packed ? (
            <Result {...alone} setup={packed.setup} title={t("pack.alone")} />
          ) : (
            <Result {...planA} setup={setups.a} onChange={change("a")} scale={scale} title={setups.b ? t("compare.a") : fold === "pack" ? t("pack.alone") : undefined} />
          )}
          {setups.b && (
            <Result {...planB} setup={setups.b} onChange={change("b")} scale={scale} title={t("compare.b")} />
          )}
        </div>
        {both && <Differences first={planA.plan} second={planB.plan} speeds={[planA.speed, planB.speed]} />}
        <Holders asked={active && fold === "size"} cards={lists.usual} setup={setups[editing]} plan={shown.plan} onChange={change(editing)} />
        <Upgrade asked={active && fold === "upgrade"} setup={setups[editing]} plan={shown.plan} lists={lists} />
        <Pack asked={active && fold === "pack"} setup={setups[editing]} plan={shown.plan} onChange={change(editing)} />
        <PlanActions plan={shown.plan} comparing={Boolean(setups.b)} onCompare={compare} />
      </div>
      <div class="knobs">
        {!packed && <Strip plan={shown.plan} />}
        <Flags setup={setups[editing]} plan={shown.plan ?? shown.last} error={shown.error} onChange={change(editing)} />
      </div>
    </div>
  );
}

// Parts of a link that nobody can read are named, so that nobody takes the plan for theirs.
function Unread({ parts }) {
  const t = useText();
  if (!parts?.length) return null;
  return (
    <Status kind="note fair">{t("address.unread")} <code>{parts.join(" ")}</code></Status>
  );
}

// Of a found setting that came by a link, the search's own words are not there.
function Chosen({ setup }) {
  const t = useText();
  if (setup.before || !setup.found?.length) return null;
  const names = setup.found.map((name) => `--${name.replaceAll("_", "-")}`);
  return <Status kind="note">{t("wish.chosen", { names: names.join(", ") })}</Status>;
}

function PlanActions({ plan, comparing, onCompare }) {
  const t = useText();
  const link = () => {
    flushAddress();
    return location.href;
  };
  const compare = (
    <Button aria-pressed={comparing} onClick={onCompare}>{t(comparing ? "compare.stop" : "compare.start")}</Button>
  );
  if (!plan) return comparing ? <div class="actions">{compare}</div> : null;
  const name = `legroom-${plan.model.replace(/[^\w.-]+/g, "-").slice(-60)}`;
  return (
    <div class="actions">
      {compare}
      <CopyButton text={link} label={t("share")} />
      <Button onClick={() => save(new Blob([pictureSvg(t, plan)], { type: "image/svg+xml" }), `${name}.svg`)}>SVG</Button>
      <Button onClick={async () => save(await picturePng(pictureSvg(t, plan)), `${name}.png`)}>PNG</Button>
      <Button onClick={() => print()}>{t("print")}</Button>
      {isLoopback() && <p class="hint">{t("share.local")}</p>}
    </div>
  );
}
