// Rows that a person is about to use stay where they are.
import type { ComponentChildren } from "preact";
import { useRef, useState } from "preact/hooks";
import { t } from "../i18n";
import { Button } from "./parts";

interface Props<T> {
  data: T[];
  keyOf: (row: T) => string;
  children: (rows: T[]) => ComponentChildren;
}

/** While the pointer or the focus is here: the rows that there were when it came, as they are now. Newer ones are offered. */
export function Still<T>({ data, keyOf, children }: Props<T>) {
  const box = useRef<HTMLDivElement>(null);
  const [held, setHeld] = useState<T[]>();
  const hold = () => setHeld((before) => before ?? data);
  const leave = () => setTimeout(() => box.current?.matches(":hover, :focus-within") || setHeld(undefined));
  const now = new Map(data.map((row) => [keyOf(row), row]));
  const rows = held?.map((row) => now.get(keyOf(row)) ?? row) ?? data;
  const isOld = held !== undefined && held.map(keyOf).join() !== [...now.keys()].join();
  return (
    <div ref={box} class="still" onPointerEnter={hold} onPointerLeave={leave} onFocusCapture={hold} onBlurCapture={leave}>
      {isOld && (
        <div class="newer">
          <Button onClick={() => setHeld(data)}>{t.common.showNewer}</Button>
        </div>
      )}
      {children(rows)}
    </div>
  );
}
