//! The end of a process in the wording of Go's `ProcessState`, which envd sends.

use envd::EndEvent;

/// Converts a status of waitpid(2); `None` if the process has only stopped or continued.
pub(crate) fn end_event(status: i32) -> Option<EndEvent> {
    let (exit_code, exited, text) = if libc::WIFEXITED(status) {
        let code = libc::WEXITSTATUS(status);
        (code, true, format!("exit status {code}"))
    } else if libc::WIFSIGNALED(status) {
        let dumped = if libc::WCOREDUMP(status) {
            " (core dumped)"
        } else {
            ""
        };
        let signal = signal_text(libc::WTERMSIG(status));
        (-1, false, format!("signal: {signal}{dumped}"))
    } else {
        return None;
    };
    Some(EndEvent {
        exit_code,
        exited,
        error: (exit_code != 0).then(|| text.clone()),
        status: text,
    })
}

/// Go's names of signals (syscall/zerrors_linux_amd64.go), by number from 1.
const SIGNALS: [&str; 31] = [
    "hangup",
    "interrupt",
    "quit",
    "illegal instruction",
    "trace/breakpoint trap",
    "aborted",
    "bus error",
    "floating point exception",
    "killed",
    "user defined signal 1",
    "segmentation fault",
    "user defined signal 2",
    "broken pipe",
    "alarm clock",
    "terminated",
    "stack fault",
    "child exited",
    "continued",
    "stopped (signal)",
    "stopped",
    "stopped (tty input)",
    "stopped (tty output)",
    "urgent I/O condition",
    "CPU time limit exceeded",
    "file size limit exceeded",
    "virtual timer expired",
    "profiling timer expired",
    "window changed",
    "I/O possible",
    "power failure",
    "bad system call",
];

fn signal_text(signal: i32) -> String {
    let place = usize::try_from(signal).ok().and_then(|n| n.checked_sub(1));
    let name = place.and_then(|place| SIGNALS.get(place));
    name.map_or_else(|| format!("signal {signal}"), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_read_as_go_writes_them() {
        let shown = |status| {
            let end = end_event(status)?;
            Some((end.exit_code, end.exited, end.status, end.error.is_some()))
        };
        let text = |text: &str| text.to_owned();
        assert_eq!(shown(0), Some((0, true, text("exit status 0"), false)));
        assert_eq!(shown(3 << 8), Some((3, true, text("exit status 3"), true)));
        assert_eq!(shown(9), Some((-1, false, text("signal: killed"), true)));
        let aborted = text("signal: aborted (core dumped)");
        assert_eq!(shown(0x80 | 6), Some((-1, false, aborted, true)));
        let unnamed = text("signal: signal 34");
        assert_eq!(shown(34), Some((-1, false, unnamed, true)));
        // Stopped, and continued.
        assert_eq!((shown(0x137f), shown(0xffff)), (None, None));
        for (number, name) in [
            (13, "broken pipe"),
            (28, "window changed"),
            (31, "bad system call"),
        ] {
            assert_eq!(signal_text(number), name);
        }
    }
}
