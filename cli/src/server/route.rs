//! Routes to the agents of sandboxes.

use std::time::Duration;

use client::endpoint::{BadUrl, Endpoint, Wire};
use envd::{ENVD_PORT, EnvdClient};
use rest::{RefreshRequest, ResumeRequest, Sandbox, SandboxDetail, SandboxState};

use super::{ANSWER, DIAL, DataPlane, Server, segment};
use crate::{
    attach::LEASE,
    failure::{Failure, Kind},
};

/// Longest sandbox id in bytes.
const MAX_ID: usize = 128;

/// A sandbox and the way to reach its agent.
#[derive(Clone)]
pub(crate) struct SandboxRoute {
    pub(crate) id: String,
    token: Option<String>,
    endpoint: Endpoint,
    /// Of the endpoint, if each sandbox has a host name.
    domain: Option<String>,
    port: u16,
}

impl Server {
    /// The route to a sandbox that the server has just returned.
    pub(crate) fn route(&self, sandbox: &Sandbox) -> Result<SandboxRoute, Failure> {
        let (token, domain) = (&sandbox.envd_access_token, &sandbox.domain);
        self.route_of(&sandbox.sandbox_id, token.as_ref(), domain.as_deref())
    }

    fn route_of(
        &self,
        id: &str,
        token: Option<&String>,
        domain: Option<&str>,
    ) -> Result<SandboxRoute, Failure> {
        let unexpected = |what: &str| {
            let to = &self.control;
            Failure::new(Kind::Unreachable, format!("{to} sent a malformed {what}"))
        };
        let is_plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        if id.is_empty() || id.len() > MAX_ID || !id.bytes().all(is_plain) {
            return Err(unexpected("sandbox id"));
        }
        let is_header = |token: &String| token.bytes().all(|b| b.is_ascii_graphic());
        if token.is_some_and(|token| !is_header(token)) {
            return Err(unexpected("access token"));
        }
        let (endpoint, domain) = match &self.data {
            DataPlane::At(endpoint) => (endpoint.clone(), None),
            DataPlane::Domain(configured) => {
                let domain = domain.unwrap_or(configured);
                (named(ENVD_PORT, id, domain)?, Some(domain.to_owned()))
            }
        };
        Ok(SandboxRoute {
            id: id.to_owned(),
            token: token.cloned(),
            endpoint,
            domain,
            port: ENVD_PORT,
        })
    }

    /// Where clients reach a port of a sandbox.
    pub(crate) fn port_url(&self, sandbox: &SandboxDetail, port: u16) -> String {
        let id = &sandbox.sandbox_id;
        match &self.data {
            DataPlane::At(endpoint) => format!("{endpoint}/sandbox/{id}/{port}/"),
            DataPlane::Domain(configured) => {
                let domain = sandbox.domain.as_ref().unwrap_or(configured);
                format!("https://{port}-{id}.{domain}")
            }
        }
    }

    /// Finds a sandbox that a command will use for at least [`LEASE`]. A paused sandbox is resumed, and pauses
    /// again at its deadline, so nothing is lost if this program is killed.
    pub(crate) fn find(&mut self, id: &str) -> Result<SandboxRoute, Failure> {
        self.find_for(id, LEASE)
    }

    /// Like [`Self::find`], for this time.
    pub(crate) fn find_for(&mut self, id: &str, time: Duration) -> Result<SandboxRoute, Failure> {
        let path = format!("/sandboxes/{}", segment(id));
        let found: SandboxDetail = self.get(&path).map_err(unknown_sandbox)?;
        let lease = i64::try_from(time.as_secs()).ok();
        match found.state {
            SandboxState::Running => {
                let body = RefreshRequest { duration: lease };
                let refreshed = self.send("POST", &format!("{path}/refreshes"), &body);
                refreshed.map_err(unknown_sandbox)?;
                let (token, domain) = (&found.envd_access_token, &found.domain);
                self.route_of(&found.sandbox_id, token.as_ref(), domain.as_deref())
            }
            SandboxState::Paused => {
                let body = ResumeRequest {
                    timeout: lease,
                    auto_pause: Some(true),
                    memory: None,
                };
                let sandbox = self.post(&format!("{path}/resume"), &body);
                let sandbox: Sandbox = sandbox.map_err(unknown_sandbox)?;
                self.route(&sandbox)
            }
        }
    }

    /// Takes back a connection to a sandbox, if both planes have the same address.
    pub(crate) fn keep(&mut self, client: EnvdClient<Wire>, route: &SandboxRoute) {
        if route.endpoint == self.control && !client.is_closing() {
            self.client = Some(client);
        }
    }

    /// Uses the kept connection for a sandbox if both planes have the same address; otherwise opens a new one. A
    /// command in a newly created sandbox therefore needs no further connection.
    pub(crate) fn agent(&mut self, route: &SandboxRoute) -> Result<EnvdClient<Wire>, Failure> {
        match self.client.take() {
            Some(client) if route.endpoint == self.control => Ok(route.over(client)),
            kept => {
                self.client = kept;
                route.dial()
            }
        }
    }
}

/// Adds the remedy to the response for a sandbox that the server does not have.
pub(crate) fn unknown_sandbox(failure: Failure) -> Failure {
    failure.if_not_found("`cube sandbox list` shows the sandboxes")
}

/// The endpoint of a port of a sandbox that has a host name.
fn named(port: u16, id: &str, domain: &str) -> Result<Endpoint, BadUrl> {
    Endpoint::parse(&format!("https://{port}-{id}.{domain}"))
}

impl SandboxRoute {
    /// The route to another port of the sandbox.
    pub(crate) fn at_port(mut self, port: u16) -> Result<Self, Failure> {
        if let Some(domain) = &self.domain {
            self.endpoint = named(port, &self.id, domain)?;
        }
        self.port = port;
        Ok(self)
    }

    /// A new connection to the port, by default the agent's.
    pub(crate) fn dial(&self) -> Result<EnvdClient<Wire>, Failure> {
        Ok(self.over(EnvdClient::over(self.endpoint.dial(DIAL)?, ANSWER)))
    }

    fn over(&self, mut client: EnvdClient<Wire>) -> EnvdClient<Wire> {
        let port = self.port.to_string();
        let headers = [
            ("e2b-sandbox-id", self.id.as_str()),
            ("e2b-sandbox-port", &port),
        ];
        client.set_route(&self.endpoint.authority(), &headers);
        client.set_access_token(self.token.clone());
        client
    }
}
