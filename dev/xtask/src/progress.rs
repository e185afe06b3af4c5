//! Progress output on standard error: a spinner on a terminal, otherwise one line per stage. Standard output is
//! reserved for data.

use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    Terminal,
    Lines,
    #[cfg(test)]
    Silent,
}

impl Progress {
    /// Chooses the spinner if standard error is a terminal.
    pub(crate) fn detect() -> Self {
        if std::io::stderr().is_terminal() {
            Self::Terminal
        } else {
            Self::Lines
        }
    }

    /// The form for stages that run at the same time as others: a terminal shows only one spinner.
    pub(crate) fn beside(self) -> Self {
        match self {
            Self::Terminal => Self::Lines,
            other => other,
        }
    }

    #[cfg(test)]
    pub(crate) fn silent() -> Self {
        Self::Silent
    }

    /// Prints a line.
    pub(crate) fn line(self, text: &str) {
        match self {
            Self::Terminal | Self::Lines => eprintln!("{text}"),
            #[cfg(test)]
            Self::Silent => {}
        }
    }

    /// Reports that a stage is up to date.
    pub(crate) fn cached(self, name: &str) {
        self.line(&format!("{name:<16} cached"));
    }

    /// Runs `work` and prints how long it took.
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
        self.line(&format!(
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
