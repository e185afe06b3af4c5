import { t } from "../i18n";
import { dismiss, notices } from "../session";

/** Messages. A dialog has them inside, because everything outside of it is inert. */
export function Notices() {
  return (
    <div class="notices" role="log" aria-label={t.common.messages} aria-live="polite">
      {notices.value.map((notice) => (
        <div key={notice.id} class={`notice ${notice.kind}`}>
          <span>
            {notice.text}
            {notice.href && (
              <>
                {" "}
                <a href={notice.href}>{t.common.open}</a>
              </>
            )}
          </span>
          <button type="button" aria-label={t.common.closeMessage} onClick={() => dismiss(notice.id)}>
            ×
          </button>
        </div>
      ))}
    </div>
  );
}
