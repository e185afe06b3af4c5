//! Runs a hazard's probe in a sandbox, as a command or as a cell of the code interpreter.

use std::time::{Duration, Instant, SystemTime};

use envd::{ClientError, EnvdClient, ExecRequest};
use model::chain;
use serde_json::{Value, json};
use testbed::{api::INTERPRETER_PORT, endpoint::Wire};

use super::list::Runner;
use crate::sandbox::{Sandbox, SandboxError, exit_zero, expect, failed};

/// Time limit of each exchange. The first cell of a language starts an interpreter, which is slow on a busy host.
pub(super) const TIMEOUT: Duration = Duration::from_secs(180);

/// Output of a command, with the caller's clocks.
#[derive(Debug)]
pub(super) struct Timed {
    /// Wall clock before the command was sent.
    pub(super) wall: SystemTime,
    /// Monotonic clock at the same moment.
    pub(super) started: Instant,
    /// Time until the response arrived.
    pub(super) took: Duration,
    pub(super) output: String,
}

impl Sandbox {
    /// Pauses the sandbox for at least `time` and resumes it. Returns a lower bound of the pause's length. Fails if the
    /// sandbox was not paused at the end.
    pub(super) fn pause_for(&self, time: Duration) -> Result<Duration, SandboxError> {
        self.pause()?;
        let since = Instant::now();
        std::thread::sleep(time);
        let lasted = since.elapsed();
        match self.connect()? {
            201 => Ok(lasted),
            _ => Err(failed("resume", "the sandbox was already running")),
        }
    }

    /// Runs code, and returns its standard output.
    pub(super) fn run(
        &self,
        runner: Runner,
        code: &str,
        root: bool,
    ) -> Result<String, SandboxError> {
        match runner {
            Runner::Shell => shell(&mut self.agent()?, code, root),
            Runner::Cell(language) => self.cell(language, code),
        }
    }

    /// Runs a command `times` times over one connection.
    pub(super) fn run_timed(&self, code: &str, times: usize) -> Result<Vec<Timed>, SandboxError> {
        let mut client = self.agent()?;
        let mut all = Vec::new();
        for _ in 0..times {
            let (wall, started) = (SystemTime::now(), Instant::now());
            let output = shell(&mut client, code, false)?;
            all.push(Timed {
                wall,
                started,
                took: started.elapsed(),
                output,
            });
        }
        Ok(all)
    }

    fn cell(&self, language: &str, code: &str) -> Result<String, SandboxError> {
        const ACTION: &str = "run a cell";
        let mut client = self.connect_port(INTERPRETER_PORT)?;
        let body = json!({ "code": code, "language": language }).to_string();
        let json = [("content-type", "application/json")];
        let answer = client.request("POST", "/execute", &json, body.as_bytes());
        let answer = answer.map_err(|error| match error {
            ClientError::Timeout(_) => failed(ACTION, "the code interpreter does not answer"),
            other => failed(ACTION, chain(&other)),
        })?;
        expect(ACTION, &answer, &[200])?;
        stdout_of(&String::from_utf8_lossy(&answer.body)).map_err(|reason| failed(ACTION, reason))
    }
}

fn shell(client: &mut EnvdClient<Wire>, code: &str, root: bool) -> Result<String, SandboxError> {
    const ACTION: &str = "run a command";
    let request = ExecRequest {
        user: Some(if root { "root" } else { "user" }.to_owned()),
        ..ExecRequest::new("/bin/bash", &["-c", code])
    };
    let done = client.exec(&request, TIMEOUT);
    let stdout = exit_zero(ACTION, done.map_err(|e| failed(ACTION, chain(&e)))?)?;
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

/// Standard output of a cell, from the interpreter's response, which has one event per line. Fails if the cell
/// raised an error or the response is incomplete.
fn stdout_of(events: &str) -> Result<String, String> {
    let mut out = String::new();
    let mut ended = false;
    for line in events.lines() {
        let event: Value =
            serde_json::from_str(line).map_err(|e| format!("a line is not an event: {e}"))?;
        let text = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
        match event["type"].as_str() {
            Some("stdout") => out.push_str(&text("text")),
            Some("error") => return Err(format!("{}: {}", text("name"), text("value"))),
            Some("end_of_execution") => ended = true,
            _ => {}
        }
    }
    if ended {
        Ok(out)
    } else {
        Err("the answer has no end_of_execution event".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_returns_its_output_or_its_error() {
        let printed = "{\"type\":\"number_of_executions\",\"execution_count\":1}\n\
             {\"type\":\"stdout\",\"text\":\"a\\n\",\"timestamp\":\"t\"}\n\
             {\"type\":\"stderr\",\"text\":\"no\",\"timestamp\":\"t\"}\n\
             {\"type\":\"stdout\",\"text\":\"b\\n\",\"timestamp\":\"t\"}\n";
        let ended = format!("{printed}{{\"type\":\"end_of_execution\"}}\n");
        assert_eq!(stdout_of(&ended).as_deref(), Ok("a\nb\n"));
        assert!(stdout_of(printed).is_err(), "there is no end_of_execution");
        let failed = format!("{printed}{{\"type\":\"error\",\"name\":\"E\",\"value\":\"v\"}}\n");
        assert_eq!(stdout_of(&failed), Err("E: v".to_owned()));
        assert!(stdout_of("<html>").is_err());
    }
}
