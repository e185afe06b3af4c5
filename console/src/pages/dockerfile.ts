// The instructions of a Dockerfile that need no files of the client, as steps of a build. `cube template build` reads more.
import { t } from "../i18n";

export interface Step {
  type: string;
  args: string[];
}

export interface Read {
  image: string;
  steps: Step[];
  startCmd?: string;
}

/** Throws with the line that cannot be built from here. */
export function readDockerfile(text: string): Read {
  const steps: Step[] = [];
  let [image, startCmd, entrypoint] = ["", "", ""];
  for (const { number, name, rest } of instructions(text)) {
    const wrong = (why: string) => new Error(t.dockerfile.line(number, why));
    switch (name) {
      case "FROM":
        if (image) throw wrong(t.dockerfile.secondFrom);
        if (/\s/.test(rest) || rest.includes("$")) throw wrong(t.dockerfile.fromImage);
        image = rest;
        break;
      case "RUN":
        if (rest.startsWith("<<") || rest.startsWith("--")) throw wrong(t.dockerfile.run);
        steps.push({ type: "RUN", args: [rest.startsWith("[") ? list(rest, wrong).map(quoted).join(" ") : rest] });
        break;
      case "ENV":
      case "ARG":
        steps.push({ type: "ENV", args: variables(rest, wrong) });
        break;
      case "WORKDIR":
      case "USER":
        steps.push({ type: name, args: [rest] });
        break;
      case "CMD":
        startCmd = command(rest, wrong);
        break;
      case "ENTRYPOINT":
        entrypoint = command(rest, wrong);
        break;
      case "LABEL":
      case "EXPOSE":
      case "MAINTAINER":
      case "STOPSIGNAL":
        break;
      case "COPY":
      case "ADD":
        throw wrong(t.dockerfile.needsFiles(name));
      default:
        throw wrong(t.dockerfile.unknown(name));
    }
  }
  if (!image) throw new Error(t.dockerfile.noFrom);
  const start = [entrypoint, startCmd].filter(Boolean).join(" ");
  return { image, steps, ...(start && { startCmd: start }) };
}

function* instructions(text: string): Generator<{ number: number; name: string; rest: string }> {
  let [held, begin] = ["", 0];
  const lines = text.replace(/\r/g, "").split("\n");
  for (const [at, raw] of lines.entries()) {
    if (/^\s*(#|$)/.test(raw)) continue;
    if (!held) begin = at + 1;
    if (/\\\s*$/.test(raw)) {
      held += `${raw.replace(/\\\s*$/, "")} `;
      continue;
    }
    const whole = (held + raw).trim();
    held = "";
    const [name = "", ...rest] = whole.split(/\s+/);
    yield { number: begin, name: name.toUpperCase(), rest: whole.slice(whole.indexOf(name) + name.length).trim() || rest.join(" ") };
  }
  if (held) throw new Error(t.dockerfile.line(begin, t.dockerfile.noEnd));
}

type Wrong = (why: string) => Error;

function list(text: string, wrong: Wrong): string[] {
  try {
    const found: unknown = JSON.parse(text);
    if (Array.isArray(found) && found.every((one) => typeof one === "string")) return found as string[];
  } catch {
    // Refused below.
  }
  throw wrong(t.dockerfile.list);
}

const quoted = (word: string) => (/^[\w./:=@%+-]+$/.test(word) ? word : `'${word.replace(/'/g, "'\\''")}'`);
const command = (rest: string, wrong: Wrong) => (rest.startsWith("[") ? list(rest, wrong).map(quoted).join(" ") : rest);

/** `A=1 B="two words"`, or `A one value`. */
function variables(rest: string, wrong: Wrong): string[] {
  const old = /^(\w+)\s+(.+)$/.exec(rest);
  if (old && !/^\w+=/.test(rest)) return [old[1] ?? "", old[2] ?? ""];
  const pairs = [...rest.matchAll(/(\w+)=("(?:[^"\\]|\\.)*"|'[^']*'|\S*)/g)];
  if (!pairs.length) throw wrong(t.dockerfile.variable);
  return pairs.flatMap(([, name = "", value = ""]) => [name, value.replace(/^(["'])(.*)\1$/s, "$2")]);
}
