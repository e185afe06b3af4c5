//! The one line that a person gets to see when something fails, without the formatting machinery of
//! standard error.

use std::{
    fs::OpenOptions,
    io::Write,
    os::fd::{AsFd, BorrowedFd},
};

/// A line in the kernel's log, shown on the console only when that is verbose.
pub(crate) fn log(message: &str) {
    kmsg("<6>", message);
}

/// A line that a quiet console shows too (priority "critical").
pub(crate) fn fail(message: &str) {
    kmsg("<2>", message);
}

/// A line on standard error.
pub(crate) fn stderr(message: &str) {
    let line = format!("guest-agent: {message}\n");
    // Nobody is left to tell when this fails.
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
