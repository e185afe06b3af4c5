//! `cube-bench history` and `cube-bench board`: many recorded runs on one page.

use std::path::{Path, PathBuf};

use clap::Args;
use harness::{
    check::Division,
    record,
    report::{
        board,
        document::Document,
        history::{self, Entry},
    },
    session::{RecordedRun, SessionError},
};
use model::chain;
use testbed::exit::End;

use super::{CommandError, report::viewed};

#[derive(Args)]
pub(super) struct History {
    /// Directories that contain results, each run in its own directory
    #[arg(required = true, value_name = "DIR")]
    dirs: Vec<PathBuf>,
    /// File to write
    #[arg(long, value_name = "FILE", default_value = "history.html")]
    out: PathBuf,
}

#[derive(Args)]
pub(super) struct Board {
    /// Directories of runs, or directories that contain them
    #[arg(required = true, value_name = "DIR")]
    dirs: Vec<PathBuf>,
    /// File to write
    #[arg(long, value_name = "FILE", default_value = "board.html")]
    out: PathBuf,
}

impl History {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        write(&self.dirs, &self.out, history::render)
    }
}

impl Board {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        write(&self.dirs, &self.out, board::render)
    }
}

/// Writes the page. A run that cannot be read is listed on the page.
fn write(
    dirs: &[PathBuf],
    out: &Path,
    render: fn(&[Entry]) -> String,
) -> Result<End, CommandError> {
    let mut entries = Vec::new();
    for dir in dirs {
        entries.extend(entries_of(dir)?);
    }
    if entries.is_empty() {
        return Err(CommandError::NoRun(dirs[0].clone()));
    }
    std::fs::write(out, render(&entries)).map_err(|source| SessionError::Io {
        path: out.to_owned(),
        source,
    })?;
    let shown = entries.iter().filter(|entry| entry.run.is_ok()).count();
    println!("{}: {shown} of {} runs", out.display(), entries.len());
    Ok(End::Pass)
}

/// The run in `dir`, or else the runs in its directories. Directories without recorded events are not runs.
fn entries_of(dir: &Path) -> Result<Vec<Entry>, CommandError> {
    if record::events_file(dir).is_some() {
        return Ok(vec![entry(dir)]);
    }
    let io_error = |source| SessionError::Io {
        path: dir.to_owned(),
        source,
    };
    let mut entries = Vec::new();
    for run in std::fs::read_dir(dir).map_err(io_error)? {
        let path = run.map_err(io_error)?.path();
        if record::events_file(&path).is_some() {
            entries.push(entry(&path));
        }
    }
    Ok(entries)
}

fn entry(dir: &Path) -> Entry {
    let read = read(dir).map_err(|error| chain(&error));
    let (run, division) = match read {
        Ok((document, division)) => (Ok(document), Some(division)),
        Err(why) => (Err(why), None),
    };
    let name = dir.display().to_string();
    Entry {
        name,
        run,
        division,
    }
}

fn read(dir: &Path) -> Result<(Document, Division), CommandError> {
    let recorded = RecordedRun::read(dir)?;
    let view = viewed(&recorded, dir)?;
    let division = Division::of(view.scenario, view.facts.sandboxes);
    Ok((Document::new(&view), division))
}
