// Data that a view shows and keeps current.
import { useEffect, useRef, useState } from "preact/hooks";
import { revival } from "./session";

export interface Live<T> {
  data: T | undefined;
  /** Of the last attempt; `data` may still be what was loaded before. */
  error: unknown;
  reload: () => void;
}

/** Calls `load` at once, every `everyMs` while the page is visible (0: once), and when the server answers again. */
export function useLive<T>(load: (signal: AbortSignal) => Promise<T>, everyMs: number, on: unknown[] = []): Live<T> {
  const [state, setState] = useState<{ data: T | undefined; error: unknown }>({ data: undefined, error: undefined });
  const [turn, setTurn] = useState(0);
  const latest = useRef(load);
  latest.current = load;
  const revived = revival.value;
  useEffect(() => setState({ data: undefined, error: undefined }), on);
  useEffect(() => {
    const abort = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    let failures = 0;
    const round = async () => {
      try {
        const data = await latest.current(abort.signal);
        if (abort.signal.aborted) return;
        failures = 0;
        setState({ data, error: undefined });
      } catch (error) {
        if (abort.signal.aborted) return;
        failures += 1;
        setState((before) => ({ data: before.data, error }));
      }
      if (everyMs > 0) timer = setTimeout(visible, Math.min(everyMs * 2 ** Math.min(failures, 3), 10_000));
    };
    const visible = () => {
      if (document.hidden) document.addEventListener("visibilitychange", () => void round(), { once: true, signal: abort.signal });
      else void round();
    };
    void round();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [everyMs, turn, revived, ...on]);
  return { ...state, reload: () => setTurn((n) => n + 1) };
}
