//! `cube-bench verify`: executes `cube-verify`.

use std::{ffi::OsString, os::unix::process::CommandExt, path::PathBuf, process};

use clap::Args;

use super::CommandError;

#[derive(Args)]
pub(super) struct Verify {
    /// Arguments of cube-verify, which this command executes
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

impl Verify {
    /// Replaces this process by `cube-verify` in the directory of this program, so its output, its exit code and its
    /// handling of signals are those of this command. Returns only if that fails.
    pub(super) fn execute(&self) -> CommandError {
        let mut path = PathBuf::from("/proc/self/exe");
        let source = match std::env::current_exe() {
            Ok(exe) => {
                path = exe.with_file_name("cube-verify");
                process::Command::new(&path).args(&self.arguments).exec()
            }
            Err(source) => source,
        };
        CommandError::Verify { path, source }
    }
}
