//! A client of E2B's API: requests to the control plane, and connections to a port of a sandbox.
//!
//! The caller owns each connection and decides whether to reuse it.

use std::{io, time::Duration};

use envd::{ClientError, EnvdClient, HttpAnswer, Transport};
use serde::Deserialize;

use crate::endpoint::{BadUrl, DialError, Endpoint, Wire};

/// Port of the code interpreter in a sandbox.
pub const INTERPRETER_PORT: u16 = 49_999;
/// Longest sandbox id that is accepted, in bytes.
const MAX_ID: usize = 128;

/// An API and the credentials for it.
#[derive(Clone, Debug)]
pub struct Api {
    /// Control plane.
    pub control: Endpoint,
    /// Pattern of the data plane's URLs, with the placeholders `{id}` and `{port}`. With `None`, requests to sandboxes
    /// go to the address of the control plane. In both cases, headers contain the sandbox id and the port.
    pub sandbox_url: Option<String>,
    /// Sent as `X-API-KEY`.
    pub key: String,
    /// Timeout for opening a connection and for each request.
    pub timeout: Duration,
}

impl Api {
    /// Opens a connection.
    ///
    /// # Errors
    /// Returns an error if [`Endpoint::dial`] fails.
    pub fn connect(&self, to: &Endpoint) -> Result<EnvdClient<Wire>, DialError> {
        let wire = to.dial(self.timeout)?;
        let mut client = EnvdClient::over(wire, self.timeout);
        client.set_route(&to.authority(), &[]);
        Ok(client)
    }

    /// Sends a request with the API key to the control plane. `client` must be a connection to the control plane.
    ///
    /// # Errors
    /// Returns an error if the request fails or times out. A response with any status is `Ok`.
    pub fn request<S: Transport>(
        &self,
        client: &mut EnvdClient<S>,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> Result<HttpAnswer, ClientError> {
        client.set_route(&self.control.authority(), &[("x-api-key", &self.key)]);
        client.set_access_token(None);
        client.set_timeout(self.timeout);
        let json = [("content-type", "application/json")];
        client.request(method, path, &json, body)
    }

    /// Sends one request with the API key to the control plane, on its own connection.
    ///
    /// # Errors
    /// Returns an error if the connection or the request fails or times out. A response with any status is `Ok`.
    pub fn send(&self, method: &str, path: &str, body: &str) -> io::Result<HttpAnswer> {
        let client = self.connect(&self.control);
        let mut client = client.map_err(io::Error::other)?;
        self.request(&mut client, method, path, body.as_bytes())
            .map_err(io::Error::other)
    }

    /// The address that serves `port` of the sandbox `id`.
    ///
    /// # Errors
    /// Returns [`BadUrl`] if `sandbox_url` is not a base URL after both placeholders are filled in.
    pub fn data_endpoint(&self, id: &str, port: u16) -> Result<Endpoint, BadUrl> {
        match &self.sandbox_url {
            None => Ok(self.control.clone()),
            Some(pattern) => {
                let url = pattern.replace("{id}", id);
                Endpoint::parse(&url.replace("{port}", &port.to_string()))
            }
        }
    }
}

/// The body of the response to a create or a fork, without the fields that are not used here.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Created {
    /// Id of the sandbox.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Token for the agent; absent if the agent accepts requests without a token.
    pub envd_access_token: Option<String>,
    /// Token for the sandbox's ports; absent if they are public.
    pub traffic_access_token: Option<String>,
}

impl Created {
    /// Checks that id and agent token can be parts of a path, a host name and a header.
    ///
    /// # Errors
    /// Returns one line that names the malformed value.
    pub fn check(&self) -> Result<(), &'static str> {
        let id = &self.sandbox_id;
        let is_plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        if id.is_empty() || id.len() > MAX_ID || !id.bytes().all(is_plain) {
            return Err("the sandbox id is malformed");
        }
        let token = self.envd_access_token.as_deref().unwrap_or_default();
        if token.bytes().all(|b| b.is_ascii_graphic()) {
            Ok(())
        } else {
            Err("the access token is malformed")
        }
    }

    /// Sets the headers of later requests on `client`, so that they reach `port` of this sandbox. `client` must be a
    /// connection to `data`.
    pub fn route<S: Transport>(&self, client: &mut EnvdClient<S>, data: &Endpoint, port: u16) {
        let port = port.to_string();
        let headers = [
            ("e2b-sandbox-id", self.sandbox_id.as_str()),
            ("e2b-sandbox-port", &port),
        ];
        client.set_route(&data.authority(), &headers);
        client.set_access_token(self.envd_access_token.clone());
    }
}
