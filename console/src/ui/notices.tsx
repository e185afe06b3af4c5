import { dismiss, notices } from "../session";

/** Messages. A dialog has them inside, because everything outside of it is inert. */
export function Notices() {
  return (
    <div class="notices" role="log" aria-label="Messages" aria-live="polite">
      {notices.value.map((notice) => (
        <div key={notice.id} class={`notice ${notice.kind}`}>
          <span>
            {notice.text}
            {notice.href && (
              <>
                {" "}
                <a href={notice.href}>Open</a>
              </>
            )}
          </span>
          <button type="button" aria-label="Close the message" onClick={() => dismiss(notice.id)}>
            ×
          </button>
        </div>
      ))}
    </div>
  );
}
