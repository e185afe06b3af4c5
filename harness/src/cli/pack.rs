//! `cube-bench pack` and `cube-bench check`: hand a recorded run to others, and check one.

use std::path::PathBuf;

use clap::Args;
use harness::{check, pack};
use testbed::exit::End;

use super::{CommandError, PlainFormat, print_json};

#[derive(Args)]
pub(super) struct Pack {
    /// Directory with the results of the run
    run: PathBuf,
    /// File to write; it must not exist
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    /// Sign the pack with this private SSH key
    #[arg(long, value_name = "KEY")]
    sign: Option<PathBuf>,
}

#[derive(Args)]
pub(super) struct Check {
    /// Directory with the results of a run, or a pack
    run: PathBuf,
    /// Require a signature by one of these signers; the format is that of ssh-keygen's allowed signers
    #[arg(long, value_name = "FILE")]
    signers: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t)]
    format: PlainFormat,
}

impl Pack {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        let list = pack::write(&self.run, &self.out, self.sign.as_deref())?;
        println!("{}: {} files", self.out.display(), list.files.len());
        Ok(End::Pass)
    }
}

impl Check {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        let result = check::check(&self.run, self.signers.as_deref())?;
        match self.format {
            PlainFormat::Human => print!("{}", result.render()),
            PlainFormat::Json => print_json(&result),
        }
        Ok(result.end())
    }
}
