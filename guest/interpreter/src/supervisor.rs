//! Restarts the server whenever it ends, so that a sandbox keeps working if its user kills the server by mistake.

use std::{
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use crate::{Config, sys};

/// A server that ran shorter than this counts as failed to start.
const SHORT: Duration = Duration::from_secs(1);
/// Pause after a failed start.
const PAUSE: Duration = Duration::from_secs(1);

/// Runs servers one after another. Returns only if the program cannot be started at all.
pub(crate) fn run(config: &Config) -> ExitCode {
    // A restarted server runs no warm-up code: clients are waiting for it.
    let mut warm = config.warm;
    loop {
        let started = Instant::now();
        let status = server(config, std::mem::take(&mut warm)).and_then(|mut c| c.status());
        match status {
            Ok(status) => eprintln!("cube-interpreter: the server ended: {status}"),
            Err(error) => {
                eprintln!("cube-interpreter: cannot start the server: {error}");
                return ExitCode::FAILURE;
            }
        }
        if started.elapsed() < SHORT {
            std::thread::sleep(PAUSE);
        }
    }
}

fn server(config: &Config, warm: bool) -> std::io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["--listen", &config.listen.to_string()])
        .arg("--hosts")
        .arg(&config.hosts)
        .arg("--state")
        .arg(&config.state);
    if let Some(port) = config.vsock {
        command.args(["--vsock", &port.to_string()]);
    }
    if warm {
        command.arg("--warm");
    }
    sys::end_with_parent(&mut command);
    Ok(command)
}
