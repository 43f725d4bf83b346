/** Reads the page's data from the document and renders it. */
import { render } from "preact";
import "./styles/theme.css";
import "./styles/base.css";
import "./styles/shell.css";
import "./styles/parts.css";
import "./styles/table.css";
import "./styles/menus.css";
import { App } from "./shell/app";
import { ErrorMessage } from "./shell/error_boundary";
import { page, parsePage } from "./store/page";
import { followAddress } from "./store/route";
import { followTheme } from "./store/theme";

function start(): void {
  const root =
    document.getElementById("app") ?? document.body.appendChild(document.createElement("div"));
  followAddress();
  followTheme();
  try {
    page.value = parsePage(document.getElementById("page")?.textContent);
  } catch (error) {
    render(<ErrorMessage error={error} />, root);
    return;
  }
  document.title = page.value.run.title;
  render(<App />, root);
}

start();
