import type { Template } from "../api";

/** The name of a template. One without a ready build has only an alias: the API lists names of ready builds. */
export function nameOf(one: Pick<Template, "names" | "aliases" | "templateID">): string {
  return one.names[0] ?? one.aliases[0] ?? one.templateID;
}
