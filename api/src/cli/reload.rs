//! `cube-api reload`: asks a running server to let a new process take over, and waits for the outcome.

use std::{io, path::PathBuf};

use api::listen::ask_reload;
use clap::Args;

use super::{Failure, STATE, failure};

#[derive(Args)]
pub(super) struct ReloadConfig {
    /// State directory of the server
    #[arg(long, value_name = "DIR", default_value = STATE)]
    state: PathBuf,
}

pub(super) fn run(config: &ReloadConfig) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|why| failure(Failure::UnsuitableHost, &why))?;
    let state = config.state.display();
    match runtime.block_on(ask_reload(&config.state)) {
        Ok(Ok(pid)) => {
            println!("{pid}");
            Ok(())
        }
        Ok(Err(why)) => Err(Failure::UnsuitableHost(format!(
            "the server was not replaced and goes on: {why}"
        ))),
        Err(why) => Err(Failure::TargetUnreachable(match why.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                format!("no server uses {state}: start one with `cube-api serve`")
            }
            _ => format!("cannot reload the server that uses {state}: {why}"),
        })),
    }
}
