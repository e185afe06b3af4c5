//! `cube-bench history`: draws the trends of recorded runs.

use std::path::{Path, PathBuf};

use clap::Args;
use harness::{
    record,
    report::{
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

impl History {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        history(&self.dirs, &self.out)
    }
}

/// Writes the page. Directories without recorded events are not runs. A run that cannot be read is listed on the
/// page.
fn history(dirs: &[PathBuf], out: &Path) -> Result<End, CommandError> {
    let mut entries = Vec::new();
    for dir in dirs {
        let io_error = |source| SessionError::Io {
            path: dir.clone(),
            source,
        };
        let runs = std::fs::read_dir(dir).map_err(io_error)?;
        for run in runs {
            let path = run.map_err(io_error)?.path();
            if record::events_file(&path).is_some() {
                entries.push(Entry {
                    name: path.display().to_string(),
                    run: document(&path).map_err(|error| chain(&error)),
                });
            }
        }
    }
    if entries.is_empty() {
        return Err(CommandError::NoRun(dirs[0].clone()));
    }
    std::fs::write(out, history::render(&entries)).map_err(|source| SessionError::Io {
        path: out.to_owned(),
        source,
    })?;
    let shown = entries.iter().filter(|entry| entry.run.is_ok()).count();
    println!("{}: {shown} of {} runs", out.display(), entries.len());
    Ok(End::Pass)
}

fn document(dir: &Path) -> Result<Document, CommandError> {
    let recorded = RecordedRun::read(dir)?;
    Ok(Document::new(&viewed(&recorded, dir)?))
}
