//! Cells that the template runs: until everything is warm, and the one that its working set is recorded with.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use api_types::envd::EnvdClient;
use model::WarmUpRequest;

use super::PORT;
use crate::template::{self, PATIENCE};

/// Importing what data agents import reads half a gigabyte, on a host that may be busy.
const WARM_UP_PATIENCE: Duration = Duration::from_secs(240);
/// What the working set is recorded with and warm clones are asked; what the answer has in it. The cell takes no
/// number and leaves nothing in the history.
const FIRST: &str = r#"{"code":"1+1","store_history":false}"#;
const ANSWER: &str = r#""text":"2""#;

/// The template's list of requests.
pub(super) fn first() -> WarmUpRequest {
    WarmUpRequest {
        port: PORT,
        path: "/execute".to_owned(),
        body: FIRST.to_owned(),
    }
}

/// Waits until the hosts are warm, and takes the paths of a first request.
pub(super) fn warm_up(vsock: &Path) -> Result<()> {
    let started = Instant::now();
    loop {
        match ready(vsock) {
            Ok(true) => break,
            Ok(false) | Err(_) if started.elapsed() < WARM_UP_PATIENCE => {
                // A look every so often would be a sleep; the agent's own command waits in the guest.
                template::run(&mut template::connect(vsock)?, &["/bin/sleep", "0.2"])?;
            }
            Ok(false) => bail!("the interpreter's hosts did not become ready"),
            Err(error) => return Err(error),
        }
    }
    // Nothing of the layer is left to write when the clones wake up.
    template::run(&mut template::connect(vsock)?, &["/bin/sync"])
}

fn ready(vsock: &Path) -> Result<bool> {
    let answer = interpreter(vsock)?.request("GET", "/ready", &[], &[])?;
    Ok(answer.status == 200)
}

/// What every clone does first.
pub(super) fn first_cell(vsock: &Path) -> Result<()> {
    let WarmUpRequest { path, body, .. } = first();
    let answer = interpreter(vsock)?.request("POST", &path, &[], body.as_bytes())?;
    let text = String::from_utf8_lossy(&answer.body);
    ensure!(text.contains(ANSWER), "{body} gave {text}");
    Ok(())
}

fn interpreter(vsock: &Path) -> Result<EnvdClient> {
    EnvdClient::connect(vsock, PORT, PATIENCE).context("the interpreter does not listen")
}
