//! `cube-bench compare`: fails if the second of two runs is slower.

use std::path::{Path, PathBuf};

use clap::Args;
use harness::{
    compare::{self, Side},
    report,
    session::{RecordedRun, SessionError},
};
use testbed::exit::End;

use super::{CommandError, PlainFormat, print_json};

#[derive(Args)]
pub(super) struct Compare {
    /// Directory with the results of the reference run
    a: PathBuf,
    /// Directory with the results of the run to check
    b: PathBuf,
    /// Largest accepted increase, in percent
    #[arg(long, default_value_t = 10.0)]
    margin: f64,
    /// Also write the comparison as an HTML page to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t)]
    format: PlainFormat,
}

impl Compare {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        compare_runs(
            [&self.a, &self.b],
            self.margin / 100.0,
            self.html,
            self.format,
        )
    }
}

fn compare_runs(
    dirs: [&Path; 2],
    margin: f64,
    html: Option<PathBuf>,
    format: PlainFormat,
) -> Result<End, CommandError> {
    let [a, b] = [RecordedRun::read(dirs[0])?, RecordedRun::read(dirs[1])?];
    let [a, b] = [&a, &b].map(|run| Side {
        summary: &run.summary,
        facts: &run.facts,
    });
    let comparison = compare::compare(a, b, margin)?;
    if let Some(path) = html {
        let names = dirs.map(|dir| dir.display().to_string());
        let names = [names[0].as_str(), names[1].as_str()];
        let page = report::comparison::render(&comparison, [a, b], names);
        std::fs::write(&path, page).map_err(|source| SessionError::Io { path, source })?;
    }
    match format {
        PlainFormat::Human => print!("{}", comparison.render()),
        PlainFormat::Json => print_json(&comparison),
    }
    Ok(comparison.end())
}
