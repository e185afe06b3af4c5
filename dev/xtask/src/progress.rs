//! What a person sees of a long run: a spinner on a terminal, one line per stage elsewhere.

use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};

/// Where progress goes. Always to standard error: standard output carries data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    Terminal,
    Lines,
    #[cfg(test)]
    Silent,
}

impl Progress {
    /// A spinner if standard error is a terminal.
    pub(crate) fn detect() -> Self {
        if std::io::stderr().is_terminal() {
            Self::Terminal
        } else {
            Self::Lines
        }
    }

    #[cfg(test)]
    pub(crate) fn silent() -> Self {
        Self::Silent
    }

    /// Says one thing.
    pub(crate) fn say(self, text: &str) {
        match self {
            Self::Terminal | Self::Lines => eprintln!("{text}"),
            #[cfg(test)]
            Self::Silent => {}
        }
    }

    /// A thing was found fresh.
    pub(crate) fn cached(self, name: &str) {
        self.say(&format!("{name:<16} cached"));
    }

    /// Does `work` and says how long it took.
    pub(crate) fn stage<T>(self, name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let started = Instant::now();
        let spinner = (self == Self::Terminal).then(|| spinner(name));
        let result = work();
        if let Some(spinner) = spinner {
            spinner.finish_and_clear();
        }
        let word = if result.is_ok() {
            "done in"
        } else {
            "failed after"
        };
        self.say(&format!(
            "{name:<16} {word} {:.1} s",
            started.elapsed().as_secs_f64()
        ));
        result
    }
}

fn spinner(name: &str) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(name.to_owned());
    if let Ok(style) = ProgressStyle::with_template("{msg:<16} {spinner} {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}
