//! Shell completions and manual pages, generated from the definition of the command line. Packages contain them.

use std::{fs, path::PathBuf};

use clap::{Command, Subcommand};
use clap_complete::Shell;

use crate::{failure::Failure, output::write};

#[derive(Subcommand, Debug)]
pub(crate) enum PagesCommand {
    /// Print completions for a shell
    Completions {
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Write a manual page for each command
    Man {
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
}

pub(crate) fn run(command: &PagesCommand, mut cube: Command) -> Result<(), Failure> {
    match command {
        PagesCommand::Completions { shell } => {
            // In memory first, because clap_complete panics if the reader of a pipe has gone.
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut cube, "cube", &mut script);
            write(&String::from_utf8_lossy(&script))
        }
        PagesCommand::Man { dir } => {
            let made = fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(cube, dir));
            made.map_err(|why| Failure::host(format!("{}: {why}", dir.display())))
        }
    }
}
