//! `cube quickstart`: from an installed package to a first sandbox, with the variables for clients.

use std::{
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use clap::Args;
use serde_json::json;

use crate::{failure::Failure, output::Format, program::Context, server::Server};

/// Name of the key that is made.
const KEY: &str = "quickstart";
/// Time for the server to make the template and to start.
const START: Duration = Duration::from_secs(300);
const STEP: Duration = Duration::from_millis(200);

#[derive(Args, Debug)]
pub(crate) struct QuickstartArgs {
    /// State directory of the server
    #[arg(long, value_name = "DIR", default_value = "/var/lib/cube")]
    state: std::path::PathBuf,
}

/// # Errors
/// Returns a [`Failure`] that names the step.
pub(crate) fn run(context: &Context, args: &QuickstartArgs) -> Result<(), Failure> {
    let mut server = context.server()?;
    ensure_running(&mut server)?;
    let key = key_for(&mut server, &args.state)?;
    let url = server.url();
    let began = Instant::now();
    let output = first_output(&url, &key)?;
    let took = began.elapsed();
    let variables = [
        ("E2B_API_URL", url.clone()),
        ("E2B_SANDBOX_URL", url),
        ("E2B_API_KEY", key),
    ];
    let exports: String = variables
        .iter()
        .map(|(name, value)| format!("export {name}={value}\n"))
        .collect();
    let text = format!(
        "A first sandbox ran in {} ms: {output}\n\
         For Python (pip install e2b), JavaScript (npm install e2b) and this command:\n\n{exports}\n\
         python3 -c 'from e2b import Sandbox; print(Sandbox.create(\"base\").commands.run(\"uname -a\").stdout)'\n\
         cube run -it -- bash",
        took.as_millis()
    );
    let variables: serde_json::Map<_, _> = variables
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value.into()))
        .collect();
    let item =
        json!({"variables": variables, "output": output, "milliseconds": took.as_secs_f64() * 1e3});
    context.format.done("quickstart", &item, &text)?;
    if context.format == Format::Human {
        eprintln!("cube: the key is shown once; `cube-api key revoke {KEY}` ends it");
    }
    Ok(())
}

/// Starts the installed service if no server answers.
fn ensure_running(server: &mut Server) -> Result<(), Failure> {
    if server.succeed("GET", "/health", b"").is_ok() {
        return Ok(());
    }
    let url = server.url();
    if !Path::new("/run/systemd/system").is_dir() {
        return Err(Failure::host(format!(
            "no server answers at {url}, and systemd does not run"
        ))
        .with_cure("run `cube-api prepare`, then `cube-api serve` in another terminal"));
    }
    eprintln!("cube: starting the server; the first start makes the template, about 10 s");
    let started = Command::new("systemctl")
        .args(["start", "cube-api.service"])
        .status();
    if !started.is_ok_and(|status| status.success()) {
        return Err(
            Failure::host("the service cube-api does not start").with_cure(
                "`cube doctor` checks what the host lacks; `journalctl -u cube-api` has the log",
            ),
        );
    }
    let deadline = Instant::now() + START;
    while let Err(why) = server.succeed("GET", "/health", b"") {
        if Instant::now() > deadline {
            return Err(why);
        }
        std::thread::sleep(STEP);
    }
    Ok(())
}

/// A key for the server: the given one, none for a server without keys, or a new one.
fn key_for(server: &mut Server, state: &Path) -> Result<String, Failure> {
    if server.succeed("GET", "/templates", b"").is_ok() {
        let given = std::env::var("E2B_API_KEY")
            .ok()
            .filter(|key| !key.is_empty());
        return Ok(given.unwrap_or_else(|| "e2b_00".to_owned()));
    }
    let program = crate::doctor::beside("cube-api");
    let made = Command::new(&program)
        .args(["key", "new", KEY, "--state"])
        .arg(state)
        .stderr(Stdio::inherit())
        .output();
    match made {
        Ok(made) if made.status.success() => {
            // The server looks at its keys every half second.
            std::thread::sleep(Duration::from_secs(1));
            Ok(String::from_utf8_lossy(&made.stdout).trim().to_owned())
        }
        Ok(_) => {
            Err(Failure::host("cannot make a key").with_cure("run as root, on the server's host"))
        }
        Err(why) => Err(Failure::host(format!(
            "cannot run {}: {why}",
            program.display()
        ))),
    }
}

fn first_output(url: &str, key: &str) -> Result<String, Failure> {
    let program = std::env::current_exe();
    let program =
        program.map_err(|why| Failure::host(format!("cannot find this program: {why}")))?;
    let ran = Command::new(program)
        .args([
            "--url",
            url,
            "run",
            "--",
            "/bin/sh",
            "-c",
            "echo hello from Linux $(uname -r)",
        ])
        .env("E2B_API_KEY", key)
        .stderr(Stdio::inherit())
        .output();
    match ran {
        Ok(ran) if ran.status.success() => {
            Ok(String::from_utf8_lossy(&ran.stdout).trim().to_owned())
        }
        Ok(ran) => Err(Failure::refused(format!(
            "the first sandbox failed: {}",
            ran.status
        ))),
        Err(why) => Err(Failure::host(format!("cannot run `cube run`: {why}"))),
    }
}
