//! A sandbox behind E2B's API.

use std::path::Path;

use envd::{ENVD_PORT, EnvdClient};
use model::chain;
use serde_json::Value;
use testbed::{
    api::{Created, INTERPRETER_PORT},
    endpoint::{Endpoint, Wire},
    leftovers,
};

use super::{E2b, failed};
use crate::{
    event::{Failure, FailureCause, StartKind},
    guest,
    scenario::ExecSpec,
    target::{Output, Sandbox},
};

/// A sandbox of the server. Dropping it kills the sandbox.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(super) target: E2b,
    /// The last connection and its endpoint; `None` before the first request and after a failed one.
    pub(super) client: Option<(Endpoint, EnvdClient<Wire>)>,
    pub(in crate::target) created: Created,
    pub(super) start: Option<StartKind>,
    /// False after a kill was requested.
    pub(super) alive: bool,
}

impl Remote {
    /// Reuses the last connection if it leads to this endpoint; otherwise connects.
    fn client_to(&mut self, to: &Endpoint) -> Result<EnvdClient<Wire>, Failure> {
        match self.client.take() {
            Some((at, client)) if at == *to => Ok(client),
            _ => self.target.connect(to),
        }
    }

    /// A connection that is routed to a port of the sandbox, with its endpoint.
    fn client_of(&mut self, port: u16) -> Result<(Endpoint, EnvdClient<Wire>), Failure> {
        let id = &self.created.sandbox_id;
        let data = self.target.api.data_endpoint(id, port);
        let data = data.map_err(|e| failed(FailureCause::Connect, chain(&e)))?;
        let mut client = self.client_to(&data)?;
        self.created.route(&mut client, &data, port);
        Ok((data, client))
    }

    /// Copies a file of this host into the sandbox.
    pub(in crate::target) fn upload(&mut self, file: &Path, to: &str) -> Result<(), Failure> {
        let bytes = std::fs::read(file)
            .map_err(|e| failed(FailureCause::Exec, format!("{}: {e}", file.display())))?;
        self.write_file(to, &bytes)
    }

    fn end(&mut self) -> Result<(), Failure> {
        self.alive = false;
        let control = self.target.api.control.clone();
        let mut client = self.client_to(&control)?;
        let path = format!("/sandboxes/{}", self.created.sandbox_id);
        let answer = self.target.api.request(&mut client, "DELETE", &path, b"");
        match answer
            .map_err(|e| guest::failure(FailureCause::Kill, &e))?
            .status
        {
            status if self.target.dialect.is_killed(status) => Ok(()),
            status => Err(failed(
                FailureCause::Kill,
                format!("kill: status {status} for {}", self.created.sandbox_id),
            )),
        }
    }
}

impl Sandbox for Remote {
    fn exec(&mut self, command: &ExecSpec) -> Result<Output, Failure> {
        let port = match command.cell {
            Some(_) => INTERPRETER_PORT,
            None => ENVD_PORT,
        };
        let (data, mut client) = self.client_of(port)?;
        let output = match &command.cell {
            Some(code) => guest::cell_over(&mut client, code, command)?,
            None => guest::exec_over(&mut client, command)?,
        };
        self.client = Some((data, client));
        Ok(output)
    }

    fn write_file(&mut self, path: &str, bytes: &[u8]) -> Result<(), Failure> {
        let (data, mut client) = self.client_of(ENVD_PORT)?;
        client.set_timeout(self.target.api.timeout);
        client
            .write_file(path, bytes, Some("root"))
            .map_err(|e| guest::failure(FailureCause::Exec, &e))?;
        self.client = Some((data, client));
        Ok(())
    }

    fn set_network(&mut self, options: &Value) -> Result<(), Failure> {
        let control = self.target.api.control.clone();
        let mut client = self.client_to(&control)?;
        let path = format!("/sandboxes/{}/network", self.created.sandbox_id);
        let body = options.to_string();
        let answer = self
            .target
            .api
            .request(&mut client, "PUT", &path, body.as_bytes())
            .map_err(|e| guest::failure(FailureCause::Network, &e))?;
        match answer.status {
            204 => {
                self.client = Some((control, client));
                Ok(())
            }
            status => Err(failed(
                FailureCause::Network,
                format!("network: status {status} for {}", self.created.sandbox_id),
            )),
        }
    }

    fn pid(&self) -> Option<u32> {
        let dir = self
            .target
            .sandboxes
            .as_ref()?
            .join(&self.created.sandbox_id);
        leftovers::processes_of(&dir).first().copied()
    }

    fn start_kind(&self) -> Option<StartKind> {
        self.start
    }

    fn kill(mut self: Box<Self>) -> Result<(), Failure> {
        self.end()
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        if self.alive {
            // On failure, the server removes the sandbox at the end of its lifetime.
            let _ = self.end();
        }
    }
}
