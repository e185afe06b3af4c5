//! One-line messages to the kernel log or standard error, without the formatting code of `eprintln!`.

use std::{
    fs::OpenOptions,
    io::Write,
    os::fd::{AsFd, BorrowedFd},
};

/// Logs a line to the kernel log, or to standard error if /dev/kmsg cannot be written. The console shows it only if its
/// log level includes "info".
pub(crate) fn log(message: &str) {
    kmsg("<6>", message);
}

/// Like [`log`], but with priority "critical", which a quiet console shows too.
pub(crate) fn fail(message: &str) {
    kmsg("<2>", message);
}

/// Writes a line to standard error.
pub(crate) fn stderr(message: &str) {
    let line = format!("guest-agent: {message}\n");
    // A failure here cannot be reported anywhere.
    let _ = nix::unistd::write(standard_error(), line.as_bytes());
}

fn kmsg(priority: &str, message: &str) {
    let line = format!("{priority}guest-agent: {}\n", message.replace('\n', " "));
    let written = OpenOptions::new()
        .write(true)
        .open("/dev/kmsg")
        .and_then(|mut kmsg| kmsg.write_all(line.as_bytes()));
    if written.is_err() {
        stderr(message);
    }
}

fn standard_error() -> BorrowedFd<'static> {
    static STDERR: std::sync::OnceLock<std::io::Stderr> = std::sync::OnceLock::new();
    STDERR.get_or_init(std::io::stderr).as_fd()
}
