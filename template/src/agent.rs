//! Requests to the agent and other servers of a guest that becomes a template.

use std::{
    fs, io,
    net::Shutdown,
    os::unix::net::UnixStream,
    path::Path,
    sync::mpsc::{Receiver, channel},
    thread::{self, JoinHandle},
};

use envd::{ENVD_PORT, EnvdClient, ExecOutput, ExecRequest, InitRequest, guest_text};

use crate::{Limits, Work, error::Cause};

/// The guest behind a VM's vsock socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guest<'a> {
    pub(crate) vsock: &'a Path,
    pub(crate) limits: Limits,
}

impl Guest<'_> {
    fn agent(&self) -> Result<EnvdClient, Cause> {
        self.connect(ENVD_PORT)
    }

    fn connect(&self, port: u16) -> Result<EnvdClient, Cause> {
        let connected = EnvdClient::connect(self.vsock, port, self.limits.answer);
        Ok(connected?)
    }

    /// Switches the guest's network card on or off. Guests of a template have no TAP. Switching the card warms up the
    /// code that a sandbox with a network runs.
    pub(crate) fn set_network(&self, on: bool) -> Result<(), Cause> {
        let request = InitRequest {
            network: Some(on),
            ..InitRequest::default()
        };
        Ok(self.agent()?.init(&request)?)
    }

    /// Copies everything below `from` to the same paths below `to` in the guest, owned by root.
    pub(crate) fn copy(&self, from: &Path, to: &str) -> Result<(), Cause> {
        for entry in fs::read_dir(from).map_err(Cause::file(from))? {
            let path = entry.map_err(Cause::file(from))?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            let not_utf8 = || io::Error::other("the name is not UTF-8");
            let name = name.ok_or_else(not_utf8).map_err(Cause::file(&path))?;
            let target = format!("{to}/{name}");
            if path.is_dir() {
                self.copy(&path, &target)?;
            } else {
                let bytes = fs::read(&path).map_err(Cause::file(&path))?;
                self.agent()?.write_file(&target, &bytes, Some("root"))?;
            }
        }
        Ok(())
    }

    pub(crate) fn all(&self, works: &[Work]) -> Result<(), Cause> {
        works.iter().try_for_each(|work| self.work(work))
    }

    pub(crate) fn work(&self, work: &Work) -> Result<(), Cause> {
        match work {
            Work::Run { argv, user } => self.run(argv, user.as_deref()).map(drop),
            Work::Request {
                port,
                path,
                body,
                expects,
            } => self.request(*port, path, body.as_deref(), expects),
        }
    }

    /// Runs a command, which must succeed, and returns its standard output.
    pub(crate) fn run(&self, argv: &[String], user: Option<&str>) -> Result<Vec<u8>, Cause> {
        let request = command(argv, user)?;
        let output = self.agent()?.exec(&request, self.limits.work)?;
        succeeded(argv, &output)?;
        Ok(output.stdout)
    }

    fn request(
        &self,
        port: u16,
        path: &str,
        body: Option<&str>,
        expects: &str,
    ) -> Result<(), Cause> {
        let method = if body.is_some() { "POST" } else { "GET" };
        let body = body.unwrap_or_default().as_bytes();
        let mut server = self.connect(port)?;
        server.set_timeout(self.limits.work);
        let answer = server.request(method, path, &[], body)?;
        let text = String::from_utf8_lossy(&answer.body);
        if answer.status == 200 && text.contains(expects) {
            return Ok(());
        }
        Err(Cause::Answer {
            port,
            path: path.to_owned(),
            status: answer.status,
            answer: guest_text(&text),
            expects: expects.to_owned(),
        })
    }

    /// Starts a command as root, and returns once it is running.
    pub(crate) fn start(&self, argv: &[String]) -> Result<Started, Cause> {
        let request = command(argv, Some("root"))?;
        let stream = self.agent()?.into_stream()?;
        let socket = stream.try_clone().map_err(Cause::file(self.vsock))?;
        let (limits, argv) = (self.limits, argv.to_vec());
        let (sender, end) = channel();
        let thread = thread::spawn(move || {
            let mut agent = EnvdClient::over(stream, limits.answer);
            let ended = agent
                .exec(&request, limits.work)
                .map_err(Cause::from)
                .and_then(|output| succeeded(&argv, &output));
            // The receiver may be gone because the build has ended.
            let _ = sender.send(ended);
        });
        Ok(Started {
            socket,
            end,
            thread: Some(thread),
        })
    }
}

/// A start command. Dropping it closes the connection. The command continues to run.
#[derive(Debug)]
pub(crate) struct Started {
    socket: UnixStream,
    end: Receiver<Result<(), Cause>>,
    thread: Option<JoinHandle<()>>,
}

impl Started {
    /// # Errors
    /// Returns an error if the command has failed. A command that has ended successfully is not an error.
    pub(crate) fn check(&self) -> Result<(), Cause> {
        self.end.try_recv().unwrap_or(Ok(()))
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // Fails only if the connection is already closed.
        let _ = self.socket.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn command(argv: &[String], user: Option<&str>) -> Result<ExecRequest, Cause> {
    let (program, arguments) = argv.split_first().ok_or(Cause::EmptyCommand)?;
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    Ok(ExecRequest {
        user: user.map(str::to_owned),
        ..ExecRequest::new(program, &arguments)
    })
}

fn succeeded(argv: &[String], output: &ExecOutput) -> Result<(), Cause> {
    if output.exited && output.exit_code == 0 {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    Err(Cause::Command {
        command: argv.join(" "),
        status: guest_text(&output.status),
        stderr: guest_text(last.unwrap_or("it printed no error")),
    })
}
