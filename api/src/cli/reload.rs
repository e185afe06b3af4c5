//! `cube-api reload`: asks a running server to let a new process take over, and waits for the outcome.

use std::io;

use api::listen::ask_reload;

use super::{Failure, config::StateDir, failure};

pub(super) fn run(state: StateDir) -> Result<(), Failure> {
    let path = state.find()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|why| failure(Failure::UnsuitableHost, &why))?;
    let state = path.display();
    match runtime.block_on(ask_reload(&path)) {
        Ok(Ok(pid)) => {
            println!("{pid}");
            Ok(())
        }
        Ok(Err(why)) => Err(Failure::UnsuitableHost(format!(
            "the server was not replaced and continues to run: {why}"
        ))),
        Err(why) => Err(Failure::TargetUnreachable(match why.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                format!("no server is running on {state}: start one with `cube-api serve`")
            }
            _ => format!("cannot reload the server that uses {state}: {why}"),
        })),
    }
}
