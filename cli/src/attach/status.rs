//! Exit codes of commands, as shells show them.

use envd::EndEvent;
use nix::sys::signal::Signal;

/// Exit code for a signal whose number is unknown.
const UNKNOWN_SIGNAL: u8 = 255;

/// The names that the agent uses (Go's, syscall/zerrors_linux_amd64.go).
const NAMES: [(&str, Signal); 25] = [
    ("hangup", Signal::SIGHUP),
    ("interrupt", Signal::SIGINT),
    ("quit", Signal::SIGQUIT),
    ("illegal instruction", Signal::SIGILL),
    ("trace/breakpoint trap", Signal::SIGTRAP),
    ("aborted", Signal::SIGABRT),
    ("bus error", Signal::SIGBUS),
    ("floating point exception", Signal::SIGFPE),
    ("killed", Signal::SIGKILL),
    ("user defined signal 1", Signal::SIGUSR1),
    ("segmentation fault", Signal::SIGSEGV),
    ("user defined signal 2", Signal::SIGUSR2),
    ("broken pipe", Signal::SIGPIPE),
    ("alarm clock", Signal::SIGALRM),
    ("terminated", Signal::SIGTERM),
    ("stack fault", Signal::SIGSTKFLT),
    ("CPU time limit exceeded", Signal::SIGXCPU),
    ("file size limit exceeded", Signal::SIGXFSZ),
    ("virtual timer expired", Signal::SIGVTALRM),
    ("profiling timer expired", Signal::SIGPROF),
    ("I/O possible", Signal::SIGIO),
    ("power failure", Signal::SIGPWR),
    ("bad system call", Signal::SIGSYS),
    ("stopped", Signal::SIGSTOP),
    ("continued", Signal::SIGCONT),
];

/// The code of a command that has ended: its own, or 128 plus the number of the signal that ended it.
pub(super) fn exit_code(end: &EndEvent) -> u8 {
    if end.exited || !end.status.starts_with("signal: ") {
        return u8::try_from(end.exit_code & 0xff).unwrap_or(UNKNOWN_SIGNAL);
    }
    let name = end.status.trim_start_matches("signal: ");
    let name = name.trim_end_matches(" (core dumped)");
    let found = NAMES.iter().find(|(known, _)| *known == name);
    let number = match found {
        Some((_, signal)) => Some(*signal as i32),
        None => name.strip_prefix("signal ").and_then(|n| n.parse().ok()),
    };
    number.and_then(of_signal).unwrap_or(UNKNOWN_SIGNAL)
}

/// 128 plus the number of a signal.
fn of_signal(number: i32) -> Option<u8> {
    u8::try_from(number.checked_add(128)?).ok()
}

/// Exit code of a program that was ended by a signal.
pub(super) fn code_of(signal: Signal) -> u8 {
    of_signal(signal as i32).unwrap_or(UNKNOWN_SIGNAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(exit_code: i32, exited: bool, status: &str) -> EndEvent {
        EndEvent {
            exit_code,
            exited,
            status: status.to_owned(),
            error: None,
        }
    }

    #[test]
    fn codes_are_those_of_shells() {
        for (exit, exited, status, code) in [
            (0, true, "exit status 0", 0),
            (3, true, "exit status 3", 3),
            (255, true, "exit status 255", 255),
            (-1, false, "signal: killed", 137),
            (-1, false, "signal: terminated", 143),
            (-1, false, "signal: aborted (core dumped)", 134),
            (-1, false, "signal: signal 34", 162),
            (-1, false, "signal: who knows", 255),
        ] {
            assert_eq!(exit_code(&end(exit, exited, status)), code, "{status}");
        }
    }
}
