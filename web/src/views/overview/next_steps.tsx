/** Commands to run next, and which checks have run. */
import { ToneMark } from "../../parts/badge";
import { Command } from "../../parts/command";
import { CopyButton } from "../../parts/copy_button";
import { Panel } from "../../parts/panel";
import { Term } from "../../parts/term";
import { page } from "../../store/page";

export function NextCommands() {
  const commands = page.value.verdict?.commands ?? [];
  if (!commands.length) return null;
  return (
    <Panel title="Next">
      <ul class="next-commands">
        {commands.map(({ command, purpose }) => (
          <li key={command}>
            <p>{purpose}</p>
            <Command text={command} />
          </li>
        ))}
      </ul>
    </Panel>
  );
}

export function Checks() {
  const checks = page.value.verdict?.checks ?? [];
  if (!checks.length) return null;
  const numRun = checks.filter((check) => check.has_run).length;
  return (
    <Panel
      title="What was checked"
      note={
        <>
          {numRun} of {checks.length} <Term word="instrument">instruments</Term> ran
        </>
      }
    >
      <ul class="checks">
        {checks.map(({ instrument, question, has_run: hasRun, command }) => (
          <li key={instrument} class={hasRun ? "tone-good" : "tone-quiet"}>
            <ToneMark tone={hasRun ? "good" : "quiet"} />
            <div>
              <p class="check-head">
                <b>{instrument}</b>
                <span class="dim">{hasRun ? "ran" : "did not run"}</span>
                {!hasRun && <CopyButton text={command} label={`copy ${command}`} />}
              </p>
              <p class="dim">{question}</p>
            </div>
          </li>
        ))}
      </ul>
    </Panel>
  );
}
