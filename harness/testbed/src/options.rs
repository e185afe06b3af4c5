//! The options that `cube-bench` and `cube-verify` share.

use std::{ffi::OsString, path::PathBuf};

use clap::{Args, Parser, ValueEnum};

use crate::{exit::End, leftovers::run_root};

#[derive(Debug, Args)]
pub struct Places {
    /// Directory that contains templates/ and results/ [default: $CUBE_ARTIFACTS, else target/cube]
    #[arg(long, value_name = "DIR")]
    pub artifacts: Option<PathBuf>,
    /// Path of cube-vmm [default: in $CUBE_BIN, else in the directory of this program]
    #[arg(long, value_name = "PATH")]
    pub vmm: Option<PathBuf>,
    /// Path of cube-api [default: in $CUBE_BIN, else in the directory of this program]
    #[arg(long, value_name = "PATH")]
    pub api: Option<PathBuf>,
}

// Socket paths are limited to 108 bytes, so clones do not live below the results.
#[derive(Debug, Args)]
pub struct RunRoot {
    /// Directory for sockets, logs and server state of runs; by default /run/cube, or /dev/shm/cube if only that is in
    /// memory
    #[arg(long, value_name = "DIR", default_value_os_t = run_root())]
    pub run_root: PathBuf,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub enum Format {
    /// Text for a terminal
    #[default]
    Human,
    /// One JSON document, described in docs/measure/report-format.md
    Json,
    /// JUnit XML for CI systems
    Junit,
}

/// Parses a command line, which begins with the name of the program.
///
/// # Errors
/// Returns the end of the process if there is nothing to do: `clap` has printed help, the version or an error.
pub fn parse<A: Parser>(words: impl IntoIterator<Item = OsString>) -> Result<A, End> {
    A::try_parse_from(words).map_err(|error| {
        // clap returns --help and --version as errors, which know whether to print to standard output.
        let _ = error.print();
        if error.use_stderr() {
            End::Usage
        } else {
            End::Pass
        }
    })
}
