// Rows that a person is about to use stay where they are.
import type { ComponentChildren } from "preact";
import { useRef, useState } from "preact/hooks";
import { t } from "../i18n";
import { Button } from "./parts";

/** Shows `data` as it was when the pointer or the focus came in, until they leave, or the newer rows are asked for. */
export function Still<T extends unknown[]>({ data, children }: { data: T; children: (data: T) => ComponentChildren }) {
  const box = useRef<HTMLDivElement>(null);
  const [held, setHeld] = useState<T>();
  const leave = () => setTimeout(() => box.current?.matches(":hover, :focus-within") || setHeld(undefined));
  const hold = () => setHeld((before) => before ?? data);
  const isOld = held !== undefined && JSON.stringify(held) !== JSON.stringify(data);
  return (
    <div ref={box} class="still" onPointerEnter={hold} onPointerLeave={leave} onFocusCapture={hold} onBlurCapture={leave}>
      {isOld && (
        <div class="newer">
          <Button onClick={() => setHeld(data)}>{t.common.showNewer}</Button>
        </div>
      )}
      {children(held ?? data)}
    </div>
  );
}
