//! A sandbox behind E2B's interface: made, forked, paused, asked by commands and cells, ended.

use std::time::{Duration, Instant, SystemTime};

use api_types::envd::{ClientError, ENVD_PORT, EnvdClient, ExecRequest, HttpAnswer};
use model::chain;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{judge::printable, list::Runner};
use testbed::endpoint::{Endpoint, Wire};

/// Port of the code interpreter in a sandbox.
const INTERPRETER_PORT: u16 = 49999;
/// Lifetime that is asked for, in seconds; a bound on what a killed suite leaves.
const LIFETIME_S: u32 = 900;
/// Bound of each exchange; the first cell of a language may start an interpreter, and hosts are busy.
const PATIENCE: Duration = Duration::from_secs(180);

/// Where sandboxes are asked for, and whose they are.
#[derive(Clone, Debug)]
pub(crate) struct Account {
    /// Control plane.
    pub(crate) api: Endpoint,
    /// Data plane, with `{id}` and `{port}`. `None`: as the control plane, by headers.
    pub(crate) sandbox_url: Option<String>,
    /// `X-API-KEY`.
    pub(crate) key: String,
    /// Template id or name.
    pub(crate) template: String,
}

/// What a create or a fork answers, as far as it matters here.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Created {
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    envd_access_token: Option<String>,
    traffic_access_token: Option<String>,
}

/// One of a list of forks.
#[derive(Debug, Deserialize)]
struct Forked {
    sandbox: Option<Created>,
    error: Option<Value>,
}

impl Account {
    /// A new sandbox.
    ///
    /// # Errors
    /// One line, when there is none.
    pub(crate) fn create(&self) -> Result<Subject<'_>, String> {
        let body = json!({ "templateID": self.template, "timeout": LIFETIME_S, "secure": true });
        let answer = self.control("POST", "/v2/sandboxes", &body)?;
        Subject::new(self, read(&answer, 201)?)
    }

    fn control(&self, method: &str, path: &str, body: &Value) -> Result<HttpAnswer, String> {
        let wire = self.api.dial(PATIENCE).map_err(|e| chain(&e))?;
        let mut client = EnvdClient::over(wire, PATIENCE);
        client.set_route(&self.api.authority(), &[("x-api-key", &self.key)]);
        let json = [("content-type", "application/json")];
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let answer = client.request(method, path, &json, body.as_bytes());
        answer.map_err(|e| format!("{method} {path}: {}", chain(&e)))
    }
}

/// The body of an answer that must have this status.
fn read<T: serde::de::DeserializeOwned>(answer: &HttpAnswer, status: u16) -> Result<T, String> {
    expect(answer, status)?;
    serde_json::from_slice(&answer.body).map_err(|e| format!("an answer that is none: {e}"))
}

fn expect(answer: &HttpAnswer, status: u16) -> Result<(), String> {
    if answer.status == status {
        Ok(())
    } else {
        let body = String::from_utf8_lossy(&answer.body);
        Err(format!("status {}: {}", answer.status, printable(&body)))
    }
}

/// A sandbox. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Subject<'a> {
    account: &'a Account,
    created: Created,
}

impl<'a> Subject<'a> {
    fn new(account: &'a Account, created: Created) -> Result<Self, String> {
        // They become parts of paths and headers.
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        let id = &created.sandbox_id;
        let token = created.envd_access_token.as_deref().unwrap_or_default();
        if id.is_empty() || !id.bytes().all(plain) || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err("the answer names no sandbox".to_owned());
        }
        Ok(Self { account, created })
    }

    pub(crate) fn id(&self) -> &str {
        &self.created.sandbox_id
    }

    /// Everything by which clients are let in, one a line.
    pub(super) fn access(&self) -> String {
        let created = &self.created;
        let tokens = [&created.envd_access_token, &created.traffic_access_token];
        let tokens = tokens.into_iter().flatten().map(String::as_str);
        let all: Vec<&str> = std::iter::once(created.sandbox_id.as_str())
            .chain(tokens)
            .collect();
        all.join("\n")
    }

    /// Two forks of it.
    ///
    /// # Errors
    /// One line, when there are not two.
    pub(super) fn fork(&self) -> Result<[Subject<'a>; 2], String> {
        let path = format!("/sandboxes/{}/fork", self.created.sandbox_id);
        let body = json!({ "count": 2, "timeout": LIFETIME_S });
        let answer = self.account.control("POST", &path, &body)?;
        let forks: Vec<Forked> = read(&answer, 201)?;
        let forks: Result<Vec<_>, String> = forks
            .into_iter()
            .map(|fork| match (fork.sandbox, fork.error) {
                (Some(created), _) => Subject::new(self.account, created),
                (None, error) => Err(format!("no fork: {}", error.unwrap_or_default())),
            })
            .collect();
        let count = |forks: Vec<_>| format!("{} forks instead of 2", forks.len());
        forks?.try_into().map_err(count)
    }

    /// Pauses it and wakes it after at least so long; returns how long it was paused for certain.
    ///
    /// # Errors
    /// One line, when one of both failed.
    pub(super) fn pause(&self, time: Duration) -> Result<Duration, String> {
        let path = |what| format!("/sandboxes/{}/{what}", self.created.sandbox_id);
        let paused = self.account.control("POST", &path("pause"), &Value::Null)?;
        expect(&paused, 204)?;
        let since = Instant::now();
        std::thread::sleep(time);
        let lasted = since.elapsed();
        let body = json!({ "timeout": LIFETIME_S });
        let woken = self.account.control("POST", &path("connect"), &body)?;
        // 200: it ran by itself again.
        expect(&woken, 201).map(|()| lasted)
    }

    /// What a program of the list prints.
    ///
    /// # Errors
    /// One line, when it failed.
    pub(super) fn run(&self, runner: Runner, code: &str, root: bool) -> Result<String, String> {
        match runner {
            Runner::Shell => self.shell(code, root),
            Runner::Cell(language) => self.cell(language, code),
        }
    }

    fn shell(&self, code: &str, root: bool) -> Result<String, String> {
        let mut client = self.dial(ENVD_PORT)?;
        self.command(&mut client, code, root)
    }

    fn command(
        &self,
        client: &mut EnvdClient<Wire>,
        code: &str,
        root: bool,
    ) -> Result<String, String> {
        let request = ExecRequest {
            cmd: "/bin/bash".to_owned(),
            args: vec!["-c".to_owned(), code.to_owned()],
            user: Some(if root { "root" } else { "user" }.to_owned()),
            stdin: Some(false),
            ..ExecRequest::default()
        };
        let output = client.exec(&request, PATIENCE).map_err(|e| chain(&e))?;
        match output.exit_code {
            0 => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            code => {
                let why = String::from_utf8_lossy(&output.stderr);
                Err(format!("exit code {code}: {}", printable(why.trim())))
            }
        }
    }

    /// Runs a command several times on one connection, with the caller's clocks before and after.
    ///
    /// # Errors
    /// One line, when one failed.
    pub(super) fn timed(&self, code: &str, times: usize) -> Result<Vec<Timed>, String> {
        let mut client = self.dial(ENVD_PORT)?;
        let mut all = Vec::new();
        for _ in 0..times {
            let (wall, started) = (SystemTime::now(), Instant::now());
            let said = self.command(&mut client, code, false)?;
            all.push(Timed {
                wall,
                started,
                took: started.elapsed(),
                said,
            });
        }
        Ok(all)
    }

    fn cell(&self, language: &str, code: &str) -> Result<String, String> {
        let mut client = self.dial(INTERPRETER_PORT)?;
        let body = json!({ "code": code, "language": language }).to_string();
        let json = [("content-type", "application/json")];
        let answer = client.request("POST", "/execute", &json, body.as_bytes());
        let answer = answer.map_err(|e| match e {
            ClientError::Timeout(_) => "the code interpreter does not answer".to_owned(),
            other => chain(&other),
        })?;
        expect(&answer, 200).map_err(|e| format!("no code interpreter: {e}"))?;
        stdout_of(&String::from_utf8_lossy(&answer.body))
    }

    fn dial(&self, port: u16) -> Result<EnvdClient<Wire>, String> {
        let id = self.created.sandbox_id.as_str();
        let port = port.to_string();
        let to = match &self.account.sandbox_url {
            None => self.account.api.clone(),
            Some(pattern) => {
                let url = pattern.replace("{id}", id).replace("{port}", &port);
                Endpoint::parse(&url).map_err(|e| chain(&e))?
            }
        };
        let wire = to.dial(PATIENCE).map_err(|e| chain(&e))?;
        let mut client = EnvdClient::over(wire, PATIENCE);
        let route = [("e2b-sandbox-id", id), ("e2b-sandbox-port", &port)];
        client.set_route(&to.authority(), &route);
        client.set_access_token(self.created.envd_access_token.clone());
        Ok(client)
    }
}

impl Drop for Subject<'_> {
    fn drop(&mut self) {
        let path = format!("/sandboxes/{}", self.created.sandbox_id);
        // Its lifetime ends what cannot be killed now.
        let _ = self.account.control("DELETE", &path, &Value::Null);
    }
}

/// What a command said, and when.
#[derive(Debug)]
pub(super) struct Timed {
    /// The caller's wall clock before it was sent.
    pub(super) wall: SystemTime,
    /// The same moment on the caller's monotonic clock.
    pub(super) started: Instant,
    /// Until the answer was there.
    pub(super) took: Duration,
    pub(super) said: String,
}

/// What a cell printed.
fn stdout_of(events: &str) -> Result<String, String> {
    let mut out = String::new();
    let mut ended = false;
    for line in events.lines() {
        let event: Value = serde_json::from_str(line).map_err(|e| format!("no event: {e}"))?;
        let text = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
        match event["type"].as_str() {
            Some("stdout") => out.push_str(&text("text")),
            Some("error") => {
                let why = format!("{}: {}", text("name"), text("value"));
                return Err(printable(&why));
            }
            Some("end_of_execution") => ended = true,
            _ => {}
        }
    }
    if ended {
        Ok(out)
    } else {
        Err("the cell has no end".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_says_what_it_printed_or_why_it_failed() {
        let printed = "{\"type\":\"number_of_executions\",\"execution_count\":1}\n\
             {\"type\":\"stdout\",\"text\":\"a\\n\",\"timestamp\":\"t\"}\n\
             {\"type\":\"stderr\",\"text\":\"no\",\"timestamp\":\"t\"}\n\
             {\"type\":\"stdout\",\"text\":\"b\\n\",\"timestamp\":\"t\"}\n";
        let ended = format!("{printed}{{\"type\":\"end_of_execution\"}}\n");
        assert_eq!(stdout_of(&ended).as_deref(), Ok("a\nb\n"));
        assert!(stdout_of(printed).is_err(), "it did not end");
        let failed = format!("{printed}{{\"type\":\"error\",\"name\":\"E\",\"value\":\"v\"}}\n");
        assert_eq!(stdout_of(&failed), Err("E: v".to_owned()));
        assert!(stdout_of("<html>").is_err());
    }
}
