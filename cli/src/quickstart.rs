//! `cube quickstart`: from an installed package to a first sandbox, with the environment variables for clients.

use std::{
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use clap::Args;
use serde_json::json;

use crate::{
    context::Context,
    failure::{Failure, Kind},
    output::Format,
    server::{Server, ServerArgs},
};

/// Name of the created key.
const KEY: &str = "quickstart";
/// Time for the server to create the template and to start.
const START: Duration = Duration::from_secs(300);
const STEP: Duration = Duration::from_millis(200);

#[derive(Args, Debug)]
pub(crate) struct QuickstartArgs {
    /// State directory of the server [default: from its configuration]
    #[arg(long, value_name = "DIR")]
    state: Option<std::path::PathBuf>,
}

/// # Errors
/// Returns a [`Failure`] that names the step.
pub(crate) fn run(context: &Context, args: &QuickstartArgs) -> Result<(), Failure> {
    let mut server = context.server()?;
    ensure_running(&mut server)?;
    let key = key_for(&mut server, &context.args, args.state.as_deref())?;
    let variables = variables(&context.args, &server.url(), &key)?;
    let began = Instant::now();
    let output = first_output(&variables)?;
    let took = began.elapsed();
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
    let lines: Vec<_> = text.lines().collect();
    context.format.lines("quickstart", &item, &lines)?;
    if context.format == Format::Human {
        eprintln!("cube: the key is shown once; `cube-api key revoke {KEY}` ends it");
    }
    Ok(())
}

/// Starts the installed service if no server responds.
fn ensure_running(server: &mut Server) -> Result<(), Failure> {
    match server.succeed("GET", "/health", b"") {
        Ok(_) => return Ok(()),
        Err(why) if !server.is_local() => return Err(why),
        Err(_) => {}
    }
    let url = server.url();
    if !Path::new("/run/systemd/system").is_dir() {
        return Err(Failure::host(format!(
            "no server responds at {url}, and systemd is not running"
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

/// Environment variables with which clients reach the server.
fn variables(
    args: &ServerArgs,
    url: &str,
    key: &str,
) -> Result<Vec<(&'static str, String)>, Failure> {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let domain = given(&args.domain);
    let has_url = given(&args.url).is_some();
    let mut found = Vec::new();
    if has_url || domain.is_none() {
        let at = given(&args.sandbox_url).unwrap_or_else(|| url.to_owned());
        found.extend([("E2B_API_URL", url.to_owned()), ("E2B_SANDBOX_URL", at)]);
    } else if let Some(at) = given(&args.sandbox_url) {
        found.push(("E2B_SANDBOX_URL", at));
    }
    found.extend(domain.map(|domain| ("E2B_DOMAIN", domain)));
    if let Some(ca) = &args.ca {
        let path = ca.canonicalize();
        let path = path.map_err(|why| Failure::host(format!("{}: {why}", ca.display())))?;
        found.push(("SSL_CERT_FILE", path.display().to_string()));
    }
    found.push(("E2B_API_KEY", key.to_owned()));
    Ok(found)
}

/// A key for the server: the given one; any key for a server without keys; or a new one if a server on this host
/// requires a key and none was given.
fn key_for(
    server: &mut Server,
    args: &ServerArgs,
    state: Option<&Path>,
) -> Result<String, Failure> {
    let given = args.key.clone().filter(|key| !key.is_empty());
    match server.succeed("GET", "/templates", b"") {
        Ok(_) => return Ok(given.unwrap_or_else(|| "e2b_00".to_owned())),
        Err(why) if why.kind == Kind::NoKey && server.is_local() => {}
        Err(why) => return Err(why),
    }
    let program = crate::doctor::beside("cube-api");
    let made = Command::new(&program)
        .args(["key", "new", KEY])
        .args(state.iter().flat_map(|dir| [Path::new("--state"), dir]))
        .stderr(Stdio::inherit())
        .output();
    match made {
        Ok(made) if made.status.success() => {
            // The server re-reads its keys every half second.
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

/// Runs a first sandbox as a client with these variables does.
fn first_output(variables: &[(&str, String)]) -> Result<String, Failure> {
    let program = std::env::current_exe();
    let program =
        program.map_err(|why| Failure::host(format!("cannot find this program: {why}")))?;
    let mut run = Command::new(program);
    for name in ["E2B_API_URL", "E2B_SANDBOX_URL", "E2B_DOMAIN"] {
        run.env_remove(name);
    }
    let ran = run
        .args([
            "run",
            "--",
            "/bin/sh",
            "-c",
            "echo hello from Linux $(uname -r)",
        ])
        .envs(variables.iter().map(|(name, value)| (name, value)))
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

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpListener,
    };

    use super::*;

    /// The key for a server that responds with this status.
    fn key_at(status: u16, key: Option<&str>) -> Result<String, Failure> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let args = ServerArgs {
            url: Some(format!("http://{}", listener.local_addr().unwrap())),
            key: key.map(str::to_owned),
            ..ServerArgs::default()
        };
        let peer = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let read = stream.read(&mut [0; 4096]).unwrap();
            assert!(read > 0);
            let answer = format!("HTTP/1.1 {status} x\r\ncontent-length: 2\r\n\r\n[]");
            stream.write_all(answer.as_bytes()).unwrap();
        });
        let found = key_for(&mut args.server().unwrap(), &args, None);
        peer.join().unwrap();
        found
    }

    #[test]
    fn a_key_is_made_only_if_none_was_given_and_one_is_needed() {
        assert_eq!(key_at(200, Some("e2b_1")).unwrap(), "e2b_1");
        assert_eq!(key_at(200, None).unwrap(), "e2b_00");
        for (status, key) in [
            (401, Some("e2b_1")),
            (403, Some("e2b_1")),
            (500, None),
            (429, None),
        ] {
            let why = key_at(status, key).unwrap_err();
            assert!(why.message.contains(&status.to_string()), "{why}");
        }
        // There is no `cube-api` next to a test.
        let why = key_at(401, None).unwrap_err();
        assert!(why.message.contains("cannot run"), "{why}");
    }

    #[test]
    fn a_server_of_another_host_is_not_started_here() {
        let args = ServerArgs {
            url: Some("http://cube.invalid:1".to_owned()),
            ..ServerArgs::default()
        };
        let why = ensure_running(&mut args.server().unwrap()).unwrap_err();
        assert_eq!(why.kind, Kind::Unreachable, "{why}");
    }

    #[test]
    fn the_variables_are_those_of_the_options() {
        let names = |args: &ServerArgs| {
            let found = variables(args, "http://u", "k").unwrap();
            found
                .into_iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect::<Vec<_>>()
        };
        let text = |text: &str| Some(text.to_owned());
        let mut args = ServerArgs::default();
        let usual = [
            "E2B_API_URL=http://u",
            "E2B_SANDBOX_URL=http://u",
            "E2B_API_KEY=k",
        ];
        assert_eq!(names(&args), usual);
        args.domain = text("d.test");
        args.ca = Some("/dev/null".into());
        assert_eq!(
            names(&args),
            [
                "E2B_DOMAIN=d.test",
                "SSL_CERT_FILE=/dev/null",
                "E2B_API_KEY=k"
            ]
        );
        (args.url, args.sandbox_url, args.ca) = (text("http://u"), text("http://s"), None);
        assert_eq!(
            names(&args),
            [
                "E2B_API_URL=http://u",
                "E2B_SANDBOX_URL=http://s",
                "E2B_DOMAIN=d.test",
                "E2B_API_KEY=k"
            ]
        );
    }
}
