//! The way to a sandbox's agent.

use std::time::Duration;

use api_client::endpoint::{Endpoint, Wire};
use api_types::{
    envd::{ENVD_PORT, EnvdClient},
    rest::{ConnectSandbox, Sandbox},
};

use super::{ANSWER, DIAL, DataPlane, Server, segment};
use crate::failure::{Failure, Kind};

/// Longest sandbox id in bytes.
const MAX_ID: usize = 128;

/// A sandbox and how its agent is reached.
#[derive(Clone)]
pub struct SandboxRoute {
    pub id: String,
    token: Option<String>,
    endpoint: Endpoint,
}

impl Server {
    /// The route to a sandbox that the server has just returned.
    pub fn route(&self, sandbox: &Sandbox) -> Result<SandboxRoute, Failure> {
        let unexpected = |what: &str| {
            let to = &self.control;
            Failure::new(Kind::Unreachable, format!("{to} sent a malformed {what}"))
        };
        let id = &sandbox.sandbox_id;
        let is_plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        if id.is_empty() || id.len() > MAX_ID || !id.bytes().all(is_plain) {
            return Err(unexpected("sandbox id"));
        }
        let token = sandbox.envd_access_token.clone();
        if token
            .iter()
            .any(|token| !token.bytes().all(|b| b.is_ascii_graphic()))
        {
            return Err(unexpected("access token"));
        }
        let endpoint = match &self.data {
            DataPlane::At(endpoint) => endpoint.clone(),
            DataPlane::Domain(domain) => {
                let domain = sandbox.domain.as_deref().unwrap_or(domain);
                Endpoint::parse(&format!("https://{ENVD_PORT}-{id}.{domain}"))?
            }
        };
        Ok(SandboxRoute {
            id: id.clone(),
            token,
            endpoint,
        })
    }

    /// Finds a sandbox, and resumes it if it is paused. `lifetime` is the least time that it then has left.
    pub fn connect(&mut self, id: &str, lifetime: Duration) -> Result<SandboxRoute, Failure> {
        let body = ConnectSandbox {
            timeout: Some(i64::try_from(lifetime.as_secs()).unwrap_or(i64::MAX)),
            memory: None,
        };
        let path = format!("/v2/sandboxes/{}/connect", segment(id));
        let sandbox: Sandbox = self.post(&path, &body).map_err(unknown_sandbox)?;
        self.route(&sandbox)
    }

    /// The kept connection as one to a sandbox, if both planes have one address; otherwise a new one. So a command
    /// that has just been told of its sandbox needs no further connection.
    pub fn agent(&mut self, route: &SandboxRoute) -> Result<EnvdClient<Wire>, Failure> {
        match self.client.take() {
            Some(client) if route.endpoint == self.control => Ok(route.over(client)),
            kept => {
                self.client = kept;
                route.dial()
            }
        }
    }
}

/// Adds the cure to the answer for a sandbox that the server does not have.
pub fn unknown_sandbox(failure: Failure) -> Failure {
    match &failure.cure {
        None if failure.message.contains("not found")
            || failure.message.contains("does not exist") =>
        {
            failure.with_cure("`cube sandbox list` shows the sandboxes")
        }
        _ => failure,
    }
}

impl SandboxRoute {
    /// A new connection to the agent.
    pub fn dial(&self) -> Result<EnvdClient<Wire>, Failure> {
        Ok(self.over(EnvdClient::over(self.endpoint.dial(DIAL)?, ANSWER)))
    }

    fn over(&self, mut client: EnvdClient<Wire>) -> EnvdClient<Wire> {
        let port = ENVD_PORT.to_string();
        let headers = [
            ("e2b-sandbox-id", self.id.as_str()),
            ("e2b-sandbox-port", &port),
        ];
        client.set_route(&self.endpoint.authority(), &headers);
        client.set_access_token(self.token.clone());
        client
    }
}
