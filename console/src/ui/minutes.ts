// Times that people type in minutes and the API takes in seconds.
import { ApiError } from "../api";
import { t } from "../i18n";
import { span } from "../text";

const LIMITS = /^timeout is -?\d+ seconds: use (\d+) to (\d+)$/;

/** Calls `send` with the seconds of `minutes`; says a limit of the server in the units of people. */
export async function timeoutIn<T>(minutes: string, send: (seconds: number) => Promise<T>): Promise<T> {
  const seconds = Math.round(Number(minutes) * 60);
  if (!(seconds > 0)) throw new Error(t.errors.minutes);
  try {
    return await send(seconds);
  } catch (error) {
    const most = error instanceof ApiError ? LIMITS.exec(error.message)?.[2] : undefined;
    if (most === undefined) throw error;
    throw new Error(t.errors.longest(span(new Date(Number(most) * 1000).toISOString(), 0), Number(most) / 60));
  }
}
