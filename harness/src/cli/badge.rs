//! `cube-bench badge`: draws one figure of a recorded run.

use std::path::PathBuf;

use clap::Args;
use harness::{
    report::badge,
    session::{RecordedRun, SessionError},
};
use testbed::exit::End;

use super::{CommandError, report::viewed};

#[derive(Args)]
pub(super) struct Badge {
    /// Directory with the results of the run
    run: PathBuf,
    /// The figure, named as the metric of a gate, such as first_exec.p95 or memory.slope
    #[arg(long, value_name = "METRIC")]
    figure: String,
    /// File to write
    #[arg(short, long, value_name = "FILE", default_value = "badge.svg")]
    out: PathBuf,
}

impl Badge {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        let recorded = RecordedRun::read(&self.run)?;
        let view = viewed(&recorded, &self.run)?;
        let svg = badge::render(&view, &self.figure);
        let svg = svg.ok_or(CommandError::NoFigure(self.figure))?;
        let path = self.out;
        std::fs::write(&path, svg).map_err(|source| SessionError::Io { path, source })?;
        Ok(End::Pass)
    }
}
