//! `cube-bench report`: recomputes and prints the report of a recorded run.

use std::path::{Path, PathBuf};

use clap::Args;
use harness::{
    report::{self, Strictness, View, document::Document, junit, terminal},
    session::{RecordedRun, SessionError},
};
use testbed::{exit::End, options::Format};

use super::CommandError;

#[derive(Args)]
pub(super) struct Report {
    /// Directory with the results of the run
    run: PathBuf,
    #[command(flatten)]
    strict: Strict,
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Args)]
pub(super) struct Strict {
    /// Fail (exit code 3) if a time or rate is missed, even on a host graded below publishable; the default if the
    /// variable CI is set
    #[arg(long)]
    strict: bool,
}

impl Strict {
    pub(super) fn strictness(&self) -> Strictness {
        let in_ci = std::env::var_os("CI").is_some_and(|value| !value.is_empty());
        if self.strict || in_ci {
            Strictness::Strict
        } else {
            Strictness::Excused
        }
    }
}

impl Report {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        report(&self.run, (self.format, self.strict.strictness()))
    }
}

pub(super) fn report(dir: &Path, output: (Format, Strictness)) -> Result<End, CommandError> {
    let (format, strictness) = output;
    let recorded = RecordedRun::read(dir)?;
    let mut view = viewed(&recorded, dir)?;
    view.strictness = strictness;
    write_reports(&view, dir)?;
    match format {
        Format::Human => print!("{}", terminal::render(&view)),
        Format::Json => print!("{}", Document::new(&view).render()),
        Format::Junit => print!("{}", junit::render(&view)),
    }
    Ok(view.end())
}

pub(super) fn write_reports(view: &View<'_>, dir: &Path) -> Result<(), CommandError> {
    for (name, text) in report::files(view) {
        let path = dir.join(name);
        std::fs::write(&path, text).map_err(|source| SessionError::Io { path, source })?;
    }
    Ok(())
}

pub(super) fn viewed<'a>(recorded: &'a RecordedRun, dir: &Path) -> Result<View<'a>, CommandError> {
    recorded
        .view()
        .ok_or_else(|| CommandError::NoRun(dir.to_owned()))
}
