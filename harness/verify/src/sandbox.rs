//! A client of E2B's API for the suites: creates sandboxes, changes them, and runs commands in them.
//!
//! Every request opens its own connection. Each suite adds its specific operations.

use std::time::Duration;

use envd::{ENVD_PORT, EnvdClient, ExecOutput, ExecRequest, HttpAnswer};
use model::chain;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};
use testbed::{
    api::{Api, Created},
    endpoint::Wire,
};

/// Characters of a response body that an error quotes.
const MAX_QUOTE: usize = 300;

/// A request to a sandbox, or about a sandbox, failed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("cannot {action}: {reason}")]
pub struct SandboxError {
    action: String,
    reason: String,
}

/// `reason` may quote a guest or a server, so its control characters are replaced.
pub(crate) fn failed(action: &str, reason: impl AsRef<str>) -> SandboxError {
    let reason = reason.as_ref().chars();
    SandboxError {
        action: action.to_owned(),
        reason: reason
            .map(|c| if c.is_control() { '?' } else { c })
            .collect(),
    }
}

/// An API, and the options that all sandboxes created there have in common.
#[derive(Clone, Debug)]
pub(crate) struct Account {
    pub(crate) api: Api,
    /// Template id or name.
    pub(crate) template: String,
    /// Lifetime of each sandbox, in seconds, after which the server ends sandboxes that a killed suite left
    /// running.
    pub(crate) lifetime_s: u32,
}

/// A sandbox. Dropping it deletes it.
#[derive(Debug)]
pub(crate) struct Sandbox {
    account: Account,
    created: Created,
}

/// One entry in the response to a fork.
#[derive(Debug, Deserialize)]
struct Forked {
    sandbox: Option<Created>,
    error: Option<Value>,
}

impl Account {
    /// Creates a sandbox with these options, in addition to the account's template and lifetime.
    pub(crate) fn create(&self, options: &Map<String, Value>) -> Result<Sandbox, SandboxError> {
        let mut body = options.clone();
        body.insert("templateID".to_owned(), json!(self.template));
        body.insert("timeout".to_owned(), json!(self.lifetime_s));
        let answer = self.request("POST", "/v2/sandboxes", Some(&Value::Object(body)))?;
        self.sandbox(decode("create a sandbox", &answer, 201)?)
    }

    /// Lists the sandboxes, to check that the endpoint responds and accepts the key.
    pub(crate) fn check(&self) -> Result<(), SandboxError> {
        let answer = self.request("GET", "/v2/sandboxes", None)?;
        expect("list the sandboxes", &answer, &[200])
    }

    fn sandbox(&self, created: Created) -> Result<Sandbox, SandboxError> {
        let checked = created.check();
        checked.map_err(|fault| failed("use the new sandbox", fault))?;
        Ok(Sandbox {
            account: self.clone(),
            created,
        })
    }

    /// Sends a request to the control plane.
    pub(crate) fn request(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<HttpAnswer, SandboxError> {
        let body = body.map(Value::to_string).unwrap_or_default();
        let answer = self.api.send(method, path, &body);
        answer.map_err(|error| failed(&format!("{method} {path}"), chain(&error)))
    }
}

impl Sandbox {
    pub(crate) fn id(&self) -> &str {
        &self.created.sandbox_id
    }

    /// Id and access tokens, one per line.
    pub(crate) fn credentials(&self) -> String {
        let created = &self.created;
        let tokens = [&created.envd_access_token, &created.traffic_access_token];
        let tokens = tokens.into_iter().flatten().map(String::as_str);
        let all: Vec<&str> = std::iter::once(self.id()).chain(tokens).collect();
        all.join("\n")
    }

    /// Sends a request about this sandbox; `path` is relative to `/sandboxes/{id}`. Returns the response if its
    /// status is one of `statuses`.
    pub(crate) fn request(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
        statuses: &[u16],
    ) -> Result<HttpAnswer, SandboxError> {
        let path = format!("/sandboxes/{}{path}", self.id());
        let answer = self.account.request(method, &path, body)?;
        expect(&format!("{method} {path}"), &answer, statuses)?;
        Ok(answer)
    }

    pub(crate) fn pause(&self) -> Result<(), SandboxError> {
        self.request("POST", "/pause", Some(&json!({})), &[204])
            .map(drop)
    }

    /// Connects to the sandbox, which resumes it if it is paused. Returns the status: 201 if it was resumed, 200 if it
    /// was already running.
    pub(crate) fn connect(&self) -> Result<u16, SandboxError> {
        let body = json!({ "timeout": self.account.lifetime_s });
        let answer = self.request("POST", "/connect", Some(&body), &[200, 201])?;
        Ok(answer.status)
    }

    /// Forks the sandbox `count` times. Fails if any fork fails.
    pub(crate) fn fork(&self, count: u32) -> Result<Vec<Self>, SandboxError> {
        let body = json!({ "count": count, "timeout": self.account.lifetime_s });
        let answer = self.request("POST", "/fork", Some(&body), &[201])?;
        let forks: Vec<Forked> = decode("fork", &answer, 201)?;
        let forks = forks.into_iter().map(|fork| match fork.sandbox {
            Some(created) => self.account.sandbox(created),
            None => Err(failed("fork", fork.error.unwrap_or_default().to_string())),
        });
        forks.collect()
    }

    /// Opens a connection to a port of the sandbox.
    pub(crate) fn connect_port(&self, port: u16) -> Result<EnvdClient<Wire>, SandboxError> {
        let action = format!("connect to port {port} of the sandbox");
        let api = &self.account.api;
        let data = api
            .data_endpoint(self.id(), port)
            .map_err(|e| failed(&action, chain(&e)))?;
        let mut client = api.connect(&data).map_err(|e| failed(&action, chain(&e)))?;
        self.created.route(&mut client, &data, port);
        Ok(client)
    }

    /// Opens a connection to the agent.
    pub(crate) fn agent(&self) -> Result<EnvdClient<Wire>, SandboxError> {
        self.connect_port(ENVD_PORT)
    }

    /// Runs a command that must exit with 0, and returns its standard output. `action` names it in errors.
    pub(crate) fn exec(
        &self,
        action: &str,
        request: &ExecRequest,
        timeout: Duration,
    ) -> Result<Vec<u8>, SandboxError> {
        let mut client = self.agent()?;
        let done = client.exec(request, timeout);
        exit_zero(action, done.map_err(|error| failed(action, chain(&error)))?)
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // If the request fails, the sandbox ends with its lifetime.
        let _ = self.request("DELETE", "", None, &[204]);
    }
}

/// Standard output of a command that exited with 0.
pub(crate) fn exit_zero(action: &str, done: ExecOutput) -> Result<Vec<u8>, SandboxError> {
    if done.exit_code == 0 {
        return Ok(done.stdout);
    }
    let stderr = String::from_utf8_lossy(&done.stderr);
    Err(failed(
        action,
        format!("{}: {}", done.status, stderr.trim()),
    ))
}

/// Checks the status of a response.
pub(crate) fn expect(
    action: &str,
    answer: &HttpAnswer,
    statuses: &[u16],
) -> Result<(), SandboxError> {
    if statuses.contains(&answer.status) {
        return Ok(());
    }
    let body = String::from_utf8_lossy(&answer.body);
    let body: String = body.chars().take(MAX_QUOTE).collect();
    Err(failed(action, format!("status {}: {body}", answer.status)))
}

/// Decodes the body of a response that must have this status.
pub(crate) fn decode<T: DeserializeOwned>(
    action: &str,
    answer: &HttpAnswer,
    status: u16,
) -> Result<T, SandboxError> {
    expect(action, answer, &[status])?;
    serde_json::from_slice(&answer.body).map_err(|error| failed(action, error.to_string()))
}
