/** The module tree × phases: an icicle above a tree-table. */
import "./modules.css";
import { Choices } from "../parts/choices";
import { Panel } from "../parts/panel";
import { Unfollowed } from "../parts/unfollowed";
import { selected } from "../store/modules";
import { page } from "../store/page";
import { param, setParam } from "../store/route";
import type { Show } from "./modules/columns";
import { listMeasures } from "./modules/measures";
import { ModuleCard } from "./modules/module_card";
import { listPictureParams, ModulePicture } from "./modules/module_picture";
import { Tree } from "./modules/tree";
import { closeAll, openAll } from "./modules/tree_state";
import type { View } from "./view";

function Modules() {
  const show: Show = param("show") === "counts" ? "counts" : "bytes";
  return (
    <>
      <ModulePicture />
      {selected.value >= 0 && <ModuleCard module={selected.value} />}
      <Panel
        title="Modules by phase"
        note={describeFigures()}
        controls={
          <>
            <button type="button" class="text-button" onClick={openAll}>
              open all
            </button>
            <button type="button" class="text-button" onClick={closeAll}>
              close all
            </button>
            <Choices
              label="columns"
              choices={[
                { id: "bytes", title: "Bytes", hint: "bytes sent by phase (ring estimate)" },
                { id: "counts", title: "Counts", hint: "collectives by phase" },
              ]}
              value={show}
              onChange={(id) => setParam("show", id === "bytes" ? null : id)}
            />
          </>
        }
      >
        {hasSizes() && <Unfollowed what="Parameters and memory" follows={["module"]} />}
        <Tree show={show} />
      </Panel>
    </>
  );
}

/** Whether the tree has columns other than those of collectives. */
function hasSizes(): boolean {
  return listMeasures(page.value).some(({ isTraffic }) => !isTraffic);
}

function describeFigures(): string {
  const { scope } = page.value.run;
  const words =
    "Figures of one rank, including children; ×n: n identical layers, with the sum of them all.";
  return scope ? `${words} Collectives: ${scope}.` : words;
}

export const view: View = {
  id: "modules",
  title: "Modules",
  hasData: (page) => page.modules.path.length > 0,
  empty: "Modules were not recorded.",
  command: "shardscope trace TARGET -o recording.json",
  params: (page) => ({ show: ["bytes", "counts"], ...listPictureParams(page) }),
  Component: Modules,
};
