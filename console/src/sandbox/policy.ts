// The network policy of a sandbox: what is in force, where it comes from, and what a change would make of it.
import type { Detail, NetworkEvent } from "../api";
import { t } from "../i18n";

export const ALL = "0.0.0.0/0";

/** What happens to destinations that no list names. */
export const REST = ["default", "nothing", "internet"] as const;
export type Rest = (typeof REST)[number];

interface Lists {
  rest: Rest;
  allowed: string[];
  /** Without `ALL`, which `rest` stands for. */
  denied: string[];
}

export interface Policy extends Lists {
  /** Whether options were set for this sandbox; otherwise the server's default applies. */
  isOwn: boolean;
}

type Options = Pick<NonNullable<Detail["network"]>, "allowOut" | "denyOut"> & { allow_internet_access?: boolean };

/** Body of `PUT /sandboxes/{id}/network`. It replaces all outbound options. */
export type Update = Options & { dnsServers?: string[]; egressProxy?: unknown; rules?: Record<string, unknown> };

export function policyOf(detail: Detail): Policy {
  const { allowOut = [], denyOut = [] } = detail.network ?? {};
  const isOwn = allowOut.length + denyOut.length > 0 || detail.allowInternetAccess !== undefined;
  const deniesAll = denyOut.includes(ALL) || detail.allowInternetAccess === false;
  // An allowed block of everything takes precedence over all denials.
  const allowsAll = allowOut.includes(ALL) || (detail.allowInternetAccess === true && !deniesAll);
  return {
    isOwn,
    rest: allowsAll ? "internet" : deniesAll ? "nothing" : "default",
    allowed: allowOut.filter((entry) => entry !== ALL),
    denied: denyOut.filter((entry) => entry !== ALL),
  };
}

export function summary(policy: Policy): string {
  const texts = t.network.summary;
  if (!policy.isOwn) return texts.default;
  const only = policy.allowed.length > 0 ? texts.only(policy.allowed.length) : texts.nothing;
  return { internet: texts.internet, nothing: only, default: texts.exceptions }[policy.rest];
}

const isName = (entry: string) => /[a-z]/i.test(entry) && !entry.includes(":");

/** Options of outbound traffic, as a create and an update take them. */
export function optionsOf({ rest, allowed, denied }: Lists): Options {
  const denyOut = [...denied, ...(rest === "nothing" ? [ALL] : [])];
  return { ...(allowed.length > 0 && { allowOut: allowed }), ...(denyOut.length > 0 && { denyOut }), ...(rest === "internet" && { allow_internet_access: true }) };
}

/** The update that gives a sandbox this policy, and leaves its other outbound options as they are. */
export function updateOf(policy: Lists, detail: Detail): Update {
  const { dnsServers, egressProxy, rules } = detail.network ?? {};
  return {
    ...optionsOf(policy),
    ...(dnsServers && { dnsServers }),
    ...(egressProxy ? { egressProxy } : {}),
    ...(rules && { rules }),
  };
}

/** Why the console cannot change the policy: it would lose what the server does not show. */
export function whyFixed(detail: Detail): string | undefined {
  const proxy = detail.network?.egressProxy as { username?: unknown } | null | undefined;
  if (!proxy?.username) return undefined;
  return t.network.fixed;
}

/** The destination of a refusal as an entry of the allow list, if the policy is what refused it. */
export function refusedHost(event: NetworkEvent, policy: Policy): string | undefined {
  if (event.direction !== "out") return undefined;
  const name = event.name?.replace(/\.$/, "").toLowerCase();
  if (event.call) return event.call.refused ? name : undefined;
  if (event.reason === "name") return name;
  if (event.reason !== "policy") return undefined;
  // Names can be allowed only if everything else is refused; the address always can.
  const takesNames = policy.rest === "nothing" || (policy.rest === "default" && policy.denied.length === 0);
  return name && takesNames ? name : addressOf(event.destination);
}

/** The address in `192.0.2.1:443` or `[2001:db8::1]:443`. */
function addressOf(destination: string): string | undefined {
  return /^\[([0-9a-f:.]+)\]:\d+$/i.exec(destination)?.[1] ?? /^(\d+(?:\.\d+){3}):\d+$/.exec(destination)?.[1];
}

/** `policy` with one more destination. A name needs everything else to be refused. */
export function allowing(policy: Policy, host: string): Policy {
  const allowed = policy.allowed.includes(host) ? policy.allowed : [...policy.allowed, host];
  // That the default has refused something shows what it is.
  const rest = isName(host) && policy.rest === "default" ? "nothing" : policy.rest;
  return { ...policy, isOwn: true, rest, allowed };
}

/** Lines that a change adds (`+`), removes (`-`) or keeps. */
export function difference(before: Lists, after: Lists): [" " | "+" | "-", string][] {
  const texts = ({ allowed, denied, rest }: Lists) => [...allowed.map(t.network.lineAllow), ...denied.map(t.network.lineDeny), t.network.lineRest(t.network.restTexts[rest])];
  const [old, now] = [texts(before), texts(after)];
  const gone = old.filter((text) => !now.includes(text)).map((text): [" " | "+" | "-", string] => ["-", text]);
  return [...gone, ...now.map((text): [" " | "+" | "-", string] => [old.includes(text) ? " " : "+", text])];
}
