//! Warms up the interpreter of the template, and runs the cell with which the template's working set is recorded.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use api_types::envd::EnvdClient;
use model::WarmUpRequest;

use super::PORT;
use crate::template::{self, ANSWER_TIMEOUT};

/// Time limit for the warm-up, which imports half a gigabyte of data science packages, on a machine that may be busy.
const WARM_UP_TIMEOUT: Duration = Duration::from_secs(240);
/// The request that records the working set and that the pool sends to every warm slot. With `store_history: false` the
/// cell takes no execution number and is not added to the history.
const FIRST: &str = r#"{"code":"1+1","store_history":false}"#;
/// The result in the answer to [`FIRST`].
const ANSWER: &str = r#""text":"2""#;

/// The entry of the template's `warm-up.json`.
pub(super) fn first() -> WarmUpRequest {
    WarmUpRequest {
        port: PORT,
        path: "/execute".to_owned(),
        body: FIRST.to_owned(),
    }
}

/// Waits until the server reports that its language hosts are warm, then flushes the guest's file systems.
pub(super) fn warm_up(vsock: &Path) -> Result<()> {
    let started = Instant::now();
    loop {
        match ready(vsock) {
            Ok(true) => break,
            Ok(false) | Err(_) if started.elapsed() < WARM_UP_TIMEOUT => {
                // The pause between two polls runs in the guest, as a command of its agent.
                template::run(&mut template::connect(vsock)?, &["/bin/sleep", "0.2"])?;
            }
            Ok(false) => bail!(
                "the interpreter did not become ready within {} s",
                WARM_UP_TIMEOUT.as_secs()
            ),
            Err(error) => return Err(error),
        }
    }
    // Dirty pages in the snapshot would be written back by every clone.
    template::run(&mut template::connect(vsock)?, &["/bin/sync"])
}

fn ready(vsock: &Path) -> Result<bool> {
    let answer = interpreter(vsock)?.request("GET", "/ready", &[], &[])?;
    Ok(answer.status == 200)
}

/// Runs the first cell and checks its result.
pub(super) fn first_cell(vsock: &Path) -> Result<()> {
    let WarmUpRequest { path, body, .. } = first();
    let answer = interpreter(vsock)?.request("POST", &path, &[], body.as_bytes())?;
    let text = String::from_utf8_lossy(&answer.body);
    ensure!(
        text.contains(ANSWER),
        "the cell {body} returned {text}, not {ANSWER}"
    );
    Ok(())
}

fn interpreter(vsock: &Path) -> Result<EnvdClient> {
    EnvdClient::connect(vsock, PORT, ANSWER_TIMEOUT).context("cannot reach the interpreter")
}
