//! The progress of a build: what its log says, as a line that is redrawn on a terminal and as plain lines elsewhere.

use std::{io, time::Duration};

use envd::guest_text;
use indicatif::{ProgressBar, ProgressStyle};
use rest::BuildLogEntry;

use model::Bytes;

use crate::attach::is_terminal;

/// Width of the bar in characters.
const BAR: usize = 20;

/// The current activity of a build.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// In the queue.
    #[default]
    Waiting,
    /// The layers of its image are downloaded.
    Pulling,
    /// They become a root image.
    Converting,
    /// Its steps run.
    Building,
    /// The start command, the ready command, the snapshot.
    Finalizing,
}

impl Phase {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Pulling => "pulling",
            Self::Converting => "converting",
            Self::Building => "building",
            Self::Finalizing => "finalizing",
        }
    }
}

/// Finished and all parts of something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) done: u64,
    /// 0: unknown.
    pub(crate) all: u64,
}

/// The state of a build according to its log: a fold over the log's entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) phase: Phase,
    pub(crate) layers: Count,
    pub(crate) bytes: Count,
    pub(crate) steps: Count,
}

impl Progress {
    /// Takes an entry of the log. Texts that are not known change nothing.
    pub(crate) fn add(&mut self, message: &str) {
        let (message, is_cached) = match message.strip_prefix("CACHED ") {
            Some(rest) => (rest, true),
            None => (message, false),
        };
        if let Some(rest) = message.strip_prefix("Base Docker image size: ") {
            self.advance(Phase::Pulling);
            if let Some((size, layers)) = rest.split_once(" in ") {
                self.bytes.all = size_of(size);
                self.layers.all = first_number(layers);
            }
        } else if let Some(rest) = layer_of(message, is_cached) {
            self.layers.done += 1;
            let size = rest.split_once(' ').map_or(0, |(_, size)| size_of(size));
            self.bytes.done = self.bytes.done.saturating_add(size);
        } else if message.starts_with("Uncompressing ") {
            self.advance(Phase::Converting);
        } else if let Some(rest) = message.strip_prefix("[builder ") {
            self.advance(Phase::Building);
            let numbers = rest.split_once(']').map_or("", |(numbers, _)| numbers);
            if let Some((done, all)) = numbers.split_once('/') {
                self.steps = Count {
                    done: first_number(done),
                    all: first_number(all),
                };
            }
        } else if message.starts_with("[finalize]") {
            self.advance(Phase::Finalizing);
        }
    }

    fn advance(&mut self, phase: Phase) {
        self.phase = self.phase.max(phase);
    }

    /// Of the phase, in percent. `None`: unknown.
    fn percent(&self) -> Option<u64> {
        let count = match self.phase {
            Phase::Pulling => self.bytes,
            Phase::Building => self.steps,
            Phase::Waiting | Phase::Converting | Phase::Finalizing => return None,
        };
        let percent = count.done.saturating_mul(100).checked_div(count.all)?;
        Some(percent.min(100))
    }

    fn line(&self, name: &str, elapsed: Duration) -> String {
        let detail = match self.phase {
            Phase::Pulling => format!(
                "  {}/{} layers  {} of {}",
                self.layers.done,
                self.layers.all,
                Bytes(self.bytes.done).rounded(),
                Bytes(self.bytes.all).rounded()
            ),
            Phase::Building => format!("  step {}/{}", self.steps.done, self.steps.all),
            Phase::Waiting | Phase::Converting | Phase::Finalizing => String::new(),
        };
        let bar = self.percent().map_or(String::new(), |percent| {
            let filled = usize::try_from(percent).unwrap_or(0) * BAR / 100;
            format!("  [{}{}]", "#".repeat(filled), "-".repeat(BAR - filled))
        });
        let (phase, seconds) = (self.phase.name(), elapsed.as_secs());
        format!("{name}  {phase}{bar}{detail}  {seconds} s")
    }
}

/// `Pulled layer DIGEST SIZE`, or `CACHED layer DIGEST SIZE`: the part after `layer`.
fn layer_of(message: &str, is_cached: bool) -> Option<&str> {
    let prefix = if is_cached { "layer " } else { "Pulled layer " };
    message.strip_prefix(prefix)
}

fn first_number(text: &str) -> u64 {
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    text.get(..digits).and_then(|d| d.parse().ok()).unwrap_or(0)
}

/// Bytes of `83 MiB`, or of `1.4 GB` as other servers have it.
fn size_of(text: &str) -> u64 {
    let Some((number, unit)) = text.trim().split_once(' ') else {
        return 0;
    };
    let scale = match unit {
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "kB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        _ => 1,
    };
    let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
    let whole = first_number(whole).saturating_mul(scale);
    whole.saturating_add(first_number(tenths).min(9) * scale / 10)
}

/// Shows the progress of one build on standard error.
#[derive(Debug)]
pub(crate) struct Display {
    name: String,
    style: Style,
    bar: ProgressBar,
    progress: Progress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// One line that is redrawn.
    Bar,
    /// Each entry of the log.
    Lines,
    Nothing,
}

impl Style {
    /// Of standard error: a bar on a terminal.
    pub(crate) fn of_stderr() -> Self {
        if is_terminal(io::stderr()) {
            Self::Bar
        } else {
            Self::Lines
        }
    }
}

impl Display {
    pub(crate) fn new(name: &str, style: Style) -> Self {
        Self {
            name: name.to_owned(),
            style,
            bar: match style {
                Style::Bar => redrawn("{msg}"),
                Style::Lines | Style::Nothing => ProgressBar::hidden(),
            },
            progress: Progress::default(),
        }
    }

    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }

    pub(crate) fn add(&mut self, entry: &BuildLogEntry) {
        self.progress.add(&entry.message);
        if self.style == Style::Lines {
            let step = entry.step.as_deref().unwrap_or("-");
            let (step, message) = (guest_text(step), guest_text(&entry.message));
            eprintln!("{}  {step}  {message}", self.name);
        }
    }

    /// Redraws the bar, if it is time.
    pub(crate) fn tick(&mut self) {
        let line = self.progress.line(&self.name, self.bar.elapsed());
        self.bar.set_message(line);
    }

    /// Removes the bar.
    pub(crate) fn finish(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Counts the bytes of files that are copied, and shows them on a terminal.
pub(crate) fn transfer(name: &str) -> ProgressBar {
    redrawn("{prefix}  {binary_bytes} of {binary_total_bytes}  {elapsed}")
        .with_prefix(name.to_owned())
}

/// A line on standard error. Shown on a terminal only, and removed when it is dropped.
fn redrawn(template: &str) -> ProgressBar {
    let bar = ProgressBar::new(0);
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(messages: &[&str]) -> Progress {
        let mut progress = Progress::default();
        for message in messages {
            progress.add(message);
        }
        progress
    }

    #[test]
    fn the_log_of_a_build_tells_its_phase_layers_and_steps() {
        let pull = [
            "[base] FROM python:3.12 [k]",
            "Base Docker image size: 390 MB in 3 layers",
            "CACHED layer sha256:aa 49 MB",
            "Pulled layer sha256:bb 1.4 GB",
        ];
        let progress = after(&pull);
        assert_eq!(progress.phase, Phase::Pulling);
        assert_eq!(progress.layers, Count { done: 2, all: 3 });
        assert_eq!(
            progress.bytes,
            Count {
                done: 1_449_000_000,
                all: 390_000_000
            }
        );
        assert_eq!(progress.percent(), Some(100));
        let steps = ["CACHED [builder 1/4] RUN a [k]", "[builder 2/4] RUN b [k]"];
        let progress = after(&[&pull[..], &["Uncompressing 3 layers"], &steps].concat());
        assert_eq!(
            (progress.phase, progress.percent()),
            (Phase::Building, Some(50))
        );
        let progress = after(&["[finalize] Finalizing template build [k]", "Pulled layer"]);
        assert_eq!(
            (progress.phase, progress.percent()),
            (Phase::Finalizing, None)
        );
    }

    #[test]
    fn the_line_has_a_bar_where_a_share_is_known() {
        let progress = after(&[
            "Base Docker image size: 4.0 kB in 2 layers",
            "Pulled layer d 1.0 kB",
        ]);
        assert_eq!(
            progress.line("x", Duration::from_secs(7)),
            "x  pulling  [#####---------------]  1/2 layers  1000 B of 3.9 KiB  7 s"
        );
        assert_eq!(
            Progress::default().line("x", Duration::ZERO),
            "x  waiting  0 s"
        );
    }

    #[test]
    fn hostile_numbers_do_no_harm() {
        for text in [
            "",
            "x",
            "99999999999999999999 GB",
            "18446744073709551615 GB",
            "1.99 MB",
        ] {
            let _any = size_of(text);
        }
        let progress = after(&[
            "Base Docker image size: 0 B in 0 layers",
            "Pulled layer d 5 GB",
        ]);
        assert_eq!(progress.percent(), None);
    }
}
