//! Starts the server again when it dies: a sandbox whose user killed it by mistake goes on.

use std::{
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use crate::{Config, sys};

/// A server that lived shorter than this did not start at all.
const SHORT: Duration = Duration::from_secs(1);
/// Pause before the next try after such a one.
const PAUSE: Duration = Duration::from_secs(1);

/// Never comes back unless no server can be started.
pub(crate) fn run(config: &Config) -> ExitCode {
    loop {
        let started = Instant::now();
        let status = server(config).and_then(|mut command| command.status());
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

fn server(config: &Config) -> std::io::Result<Command> {
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
    sys::end_with_parent(&mut command);
    Ok(command)
}
