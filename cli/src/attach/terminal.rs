//! The terminal of this program: whether there is one, its size, raw mode.

use std::{
    io,
    os::fd::AsFd,
    sync::{Mutex, PoisonError},
};

use envd::PtySize;
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};

use crate::failure::Failure;

/// Default for a terminal of unknown size.
const USUAL: PtySize = PtySize { cols: 80, rows: 24 };

/// The settings to restore; `None`: the terminal is not in raw mode.
static SAVED: Mutex<Option<Termios>> = Mutex::new(None);

pub(crate) fn is_terminal(stream: impl AsFd) -> bool {
    isatty(stream)
}

/// The size of the terminal of standard output or input.
pub(crate) fn size() -> PtySize {
    let of = |size: rustix::termios::Winsize| PtySize {
        cols: u32::from(size.ws_col),
        rows: u32::from(size.ws_row),
    };
    let out = tcgetwinsize(io::stdout()).or_else(|_| tcgetwinsize(io::stdin()));
    let known = out
        .map(of)
        .ok()
        .filter(|size| size.cols > 0 && size.rows > 0);
    known.unwrap_or(USUAL)
}

/// Raw mode of standard input: each key goes to the command, ^C included. Ends when the value is dropped.
pub(super) struct RawMode;

impl RawMode {
    pub(super) fn enter() -> Result<Self, Failure> {
        let failed = |why| Failure::host(format!("cannot set the terminal's raw mode: {why}"));
        let mut settings = tcgetattr(io::stdin()).map_err(failed)?;
        *saved() = Some(settings.clone());
        settings.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Drain, &settings).map_err(failed)?;
        Ok(Self)
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

/// Ends raw mode. May be called from any thread that ends the program.
pub(super) fn restore() {
    if let Some(settings) = saved().take() {
        // A terminal that is gone needs no restoring.
        let _gone = tcsetattr(io::stdin(), OptionalActions::Drain, &settings);
    }
}

fn saved() -> std::sync::MutexGuard<'static, Option<Termios>> {
    SAVED.lock().unwrap_or_else(PoisonError::into_inner)
}
