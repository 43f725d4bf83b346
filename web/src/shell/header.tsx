/** The header: what ran, and what applies to every view (search, theme). */
import { SearchBox } from "../parts/search_box";
import { formatNumber } from "../parts/units";
import { page } from "../store/page";
import { changeRoute, navigate, route } from "../store/route";
import { search, searchError, searchedPattern, setSearch } from "../store/search";
import { theme, toggleTheme } from "../store/theme";
import { ExportMenu } from "./export_menu";
import { openKeyHelp, searchInput } from "./keys";

export function Header() {
  const { run } = page.value;
  return (
    <header class="header">
      <div class="header-run">
        <Logo />
        <h1 class="header-title" title={run.title}>
          {run.title}
        </h1>
        <Mesh />
        <span class="header-facts">
          {[run.ranks, run.world, run.torch_version && `torch ${run.torch_version}`]
            .filter(Boolean)
            .join(" · ")}
        </span>
      </div>
      <div class="header-tools">
        <SearchBox
          value={search.value}
          onInput={setSearch}
          label="Search this page"
          hint="/"
          error={searchError.value}
          offer={searchedPattern.value && `Enter selects the modules that match, in every view.`}
          onEnter={selectPattern}
          inputRef={searchInput}
        />
        <ExportMenu />
        <ThemeButton />
        <button
          type="button"
          class="icon-button"
          title="Keys (?)"
          aria-label="Keys"
          onClick={openKeyHelp}
        >
          ?
        </button>
      </div>
    </header>
  );
}

/** Selects the modules that the search matches, in place of the search. */
function selectPattern(): void {
  navigate(changeRoute(route.value, route.value.view, { m: searchedPattern.value, q: null }));
}

function Logo() {
  return (
    <svg class="mark" viewBox="0 0 20 20" aria-hidden="true">
      <path class="mark-a" d="M2 2h7v7H2Z" />
      <path class="mark-b" d="M11 2h7v7h-7Z" />
      <path class="mark-b" d="M2 11h7v7H2Z" />
      <path class="mark-c" d="M11 11h7v7h-7Z" />
    </svg>
  );
}

function Mesh() {
  const { mesh, title } = page.value.run;
  // Generated titles name the mesh; a user's own title may not.
  if (mesh.every((axis) => title.includes(`${axis.name}=${axis.size}`))) return null;
  return (
    <span
      class="mesh"
      role="img"
      aria-label={`mesh: ${mesh.map((axis) => `${axis.name}=${axis.size}`).join(" × ")}`}
    >
      {mesh.map((axis) => (
        <span key={axis.name} class="mesh-axis">
          <span class="mesh-name">{axis.name}</span>
          {formatNumber(axis.size)}
        </span>
      ))}
    </span>
  );
}

function ThemeButton() {
  const otherTheme = theme.value === "dark" ? "light" : "dark";
  return (
    <button
      type="button"
      class="icon-button"
      title={`Use ${otherTheme} colours (t)`}
      aria-label={`Use ${otherTheme} colours`}
      onClick={toggleTheme}
    >
      <svg viewBox="0 0 16 16" aria-hidden="true">
        {theme.value === "dark" ? (
          <path d="M8 5a3 3 0 1 1 0 6 3 3 0 0 1 0-6ZM8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1.1 1.1M11.9 11.9 13 13M3 13l1.1-1.1M11.9 4.1 13 3" />
        ) : (
          <path d="M13.5 9.5A6 6 0 0 1 6.5 2.5a6 6 0 1 0 7 7Z" />
        )}
      </svg>
    </button>
  );
}
