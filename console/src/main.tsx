import "./nonce";
import "@xterm/xterm/css/xterm.css";
import "uplot/dist/uPlot.min.css";
import "./style.css";
import { render } from "preact";
import { App } from "./app";

const root = document.getElementById("app");
if (root) {
  root.replaceChildren();
  render(<App />, root);
}
