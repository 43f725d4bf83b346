/** A wrong or failing run, on every tab but the overview, whose verdict says the same. */
import { ToneMark, toneOf } from "../parts/badge";
import { page } from "../store/page";
import { hrefTo, route } from "../store/route";
import { findView } from "../views";

const SHOWN = ["wrong", "fails"];

export function Alert() {
  const concern = page.value.verdict?.concerns[0];
  if (!concern || !SHOWN.includes(concern.judgement)) return null;
  if (findView(route.value.view).id === "overview") return null;
  const tone = toneOf(concern.judgement);
  return (
    <div class={`alert tone-${tone}`} role="alert">
      <ToneMark tone={tone} />
      <a href={hrefTo(concern.view || "overview")}>
        <b>{concern.label}:</b> {concern.fact}
        {concern.reason && `: ${concern.reason}`}.
      </a>
    </div>
  );
}
