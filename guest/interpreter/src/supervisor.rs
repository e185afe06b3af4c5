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
    // Who waits for a server that was killed does not want it to take its time.
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
