//! The server of a command: its address, the key, and requests to its control plane.

mod path;
mod route;

use std::{io::Read, path::PathBuf, time::Duration};

use clap::{ArgMatches, Args, parser::ValueSource};
use client::endpoint::{Endpoint, Wire, trust_only};
use envd::{ClientError, EnvdClient, HttpAnswer};
use rest::RestError;
use serde::{Serialize, de::DeserializeOwned};

use crate::failure::{Failure, Kind, Peer};

pub(crate) use path::segment;
pub(crate) use route::{SandboxRoute, unknown_sandbox};

/// Address of a server on this host.
const DEFAULT_URL: &str = "http://127.0.0.1:3000";
/// Timeout of a connection.
const DIAL: Duration = Duration::from_secs(10);
/// Timeout of a response. A create waits up to a minute for free resources.
const ANSWER: Duration = Duration::from_secs(120);
/// Timeout of the files of one COPY.
const UPLOAD: Duration = Duration::from_secs(3600);

/// Options of all commands that talk to a server.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Server")]
pub(crate) struct ServerArgs {
    /// URL of the server [default: http://127.0.0.1:3000]
    #[arg(long, global = true, env = "E2B_API_URL", hide_env_values = true)]
    pub(crate) url: Option<String>,
    /// API key; a server started with --insecure-loopback needs none
    #[arg(long, global = true, env = "E2B_API_KEY", hide_env_values = true)]
    pub(crate) key: Option<String>,
    /// URL at which sandboxes are reached, if different from the server's; the variable is ignored with --url or
    /// --domain
    #[arg(
        long,
        global = true,
        env = "E2B_SANDBOX_URL",
        value_name = "URL",
        hide_env_values = true
    )]
    pub(crate) sandbox_url: Option<String>,
    /// Domain of the server (api.DOMAIN) and of its sandboxes, used without --url
    #[arg(long, global = true, env = "E2B_DOMAIN", hide_env_values = true)]
    pub(crate) domain: Option<String>,
    /// PEM file with the only certificate authorities to trust [default: SSL_CERT_FILE, or the system's]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,
}

/// Destination of requests to sandboxes.
#[derive(Clone, Debug)]
enum DataPlane {
    /// One address, which routes by headers.
    At(Endpoint),
    /// A host name for each sandbox.
    Domain(String),
}

/// A server. It keeps one connection, and opens another one when that has ended.
#[derive(Debug)]
pub(crate) struct Server {
    control: Endpoint,
    data: DataPlane,
    key: Option<String>,
    client: Option<EnvdClient<Wire>>,
    /// Timeout of a response.
    patience: Duration,
}

/// Empty variables and options count as absent.
fn given(text: Option<&String>) -> Option<&str> {
    text.map(|text| text.trim()).filter(|text| !text.is_empty())
}

impl ServerArgs {
    /// Drops the sandbox URL of the environment if the command line names a server, because it belongs to the
    /// server in the environment.
    pub(crate) fn of_one_server(mut self, matches: &ArgMatches) -> Self {
        let came = |name| matches.value_source(name);
        let is_named = ["url", "domain"]
            .map(came)
            .contains(&Some(ValueSource::CommandLine));
        if is_named && came("sandbox_url") == Some(ValueSource::EnvVariable) {
            self.sandbox_url = None;
        }
        self
    }

    /// Checks the options. Opens no connection.
    pub(crate) fn server(&self) -> Result<Server, Failure> {
        if let Some(path) = &self.ca {
            trust_only(path)?;
        }
        let (url, domain) = (given(self.url.as_ref()), given(self.domain.as_ref()));
        let control = match (url, domain) {
            (Some(url), _) => Endpoint::parse(url)?,
            (None, Some(domain)) => Endpoint::parse(&format!("https://api.{domain}"))?,
            (None, None) => Endpoint::parse(DEFAULT_URL)?,
        };
        let data = match (given(self.sandbox_url.as_ref()), url, domain) {
            (Some(at), ..) => DataPlane::At(Endpoint::parse(at)?),
            (None, None, Some(domain)) => DataPlane::Domain(domain.to_owned()),
            (None, ..) => DataPlane::At(control.clone()),
        };
        let key = given(self.key.as_ref()).map(str::to_owned);
        if key
            .iter()
            .any(|key| !key.bytes().all(|b| b.is_ascii_graphic()))
        {
            return Err(Failure::usage(
                "the key contains invalid characters: check --key or E2B_API_KEY",
            ));
        }
        Ok(Server {
            control,
            data,
            key,
            client: None,
            patience: ANSWER,
        })
    }
}

impl Server {
    /// The same server, with its own connection.
    pub(crate) fn another(&self) -> Self {
        Self {
            control: self.control.clone(),
            data: self.data.clone(),
            key: self.key.clone(),
            client: None,
            patience: self.patience,
        }
    }

    /// The same server, with this timeout for responses.
    pub(crate) fn within(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    pub(crate) fn url(&self) -> String {
        self.control.to_string()
    }

    /// Whether the server's address is local to this host.
    pub(crate) fn is_local(&self) -> bool {
        self.control.is_loopback()
    }

    /// Whether a program accepts connections at the server's address.
    pub(crate) fn is_listening(&self) -> bool {
        self.control.dial(DIAL).is_ok()
    }

    pub(crate) fn get<A: DeserializeOwned>(&mut self, path: &str) -> Result<A, Failure> {
        self.read("GET", path, b"")
    }

    pub(crate) fn post<A: DeserializeOwned>(
        &mut self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<A, Failure> {
        self.read("POST", path, &to_json(body)?)
    }

    /// A request whose response has no relevant body.
    pub(crate) fn send(
        &mut self,
        method: &str,
        path: &str,
        body: &impl Serialize,
    ) -> Result<(), Failure> {
        let body = to_json(body)?;
        self.succeed(method, path, &body).map(drop)
    }

    pub(crate) fn delete(&mut self, path: &str) -> Result<(), Failure> {
        self.succeed("DELETE", path, b"").map(drop)
    }

    /// Sends a file to a URL that the server returned. The URL carries its own authorization, so the key is not
    /// sent.
    pub(crate) fn put(&self, url: &str, from: &mut impl Read, length: u64) -> Result<(), Failure> {
        let malformed = || {
            let to = &self.control;
            Failure::new(
                Kind::Unreachable,
                format!("{to} sent a malformed URL for files"),
            )
        };
        let after = url.find("://").map(|at| at + 3).ok_or_else(malformed)?;
        let slash = url[after..].find('/').ok_or_else(malformed)?;
        let (origin, target) = url.split_at(after + slash);
        if !target.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(malformed());
        }
        let endpoint = Endpoint::parse(origin)?;
        let mut client = EnvdClient::over(endpoint.dial(DIAL)?, UPLOAD);
        client.set_route(&endpoint.authority(), &[]);
        let sent = client.send_stream("PUT", target, &[], from, length);
        let answer = sent.map_err(|why| Failure::of_call(&why, &Peer::Server(&endpoint)))?;
        match answer.status {
            200..300 => Ok(()),
            status => Err(self.refusal(status, &answer)),
        }
    }

    /// All elements of a paged list.
    pub(crate) fn pages<T: DeserializeOwned>(&mut self, path: &str) -> Result<Vec<T>, Failure> {
        let (mut all, mut next) = (Vec::new(), String::new());
        let joint = if path.contains('?') { '&' } else { '?' };
        loop {
            let token = segment(&next);
            let answer = self.succeed("GET", &format!("{path}{joint}nextToken={token}"), b"")?;
            let page: Vec<T> = self.parse(&answer.body)?;
            let is_last = page.is_empty();
            all.extend(page);
            match answer.header("x-next-token") {
                Some(token) if !token.is_empty() && !is_last => next = token.to_owned(),
                _ => return Ok(all),
            }
        }
    }

    fn read<A: DeserializeOwned>(
        &mut self,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> Result<A, Failure> {
        let answer = self.succeed(method, path, body)?;
        self.parse(&answer.body)
    }

    fn parse<A: DeserializeOwned>(&self, body: &[u8]) -> Result<A, Failure> {
        serde_json::from_slice(body).map_err(|why| {
            let to = &self.control;
            Failure::new(
                Kind::Unreachable,
                format!("{to} sent an unexpected response: {why}"),
            )
            .with_cure("check that the URL is that of an E2B-compatible server")
        })
    }

    /// A request that must succeed.
    pub(crate) fn succeed(
        &mut self,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> Result<HttpAnswer, Failure> {
        let answer = self.request(method, path, body)?;
        match answer.status {
            200..300 => Ok(answer),
            status => Err(self.refusal(status, &answer)),
        }
    }

    /// A request with any response. If a kept connection has ended, a read is retried on a new one.
    pub(crate) fn request(
        &mut self,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> Result<HttpAnswer, Failure> {
        let is_kept = self.client.is_some();
        match self.try_request(method, path, body)? {
            Err(ClientError::NotReachable { .. }) if is_kept && method != "POST" => {
                let again = self.try_request(method, path, body)?;
                again.map_err(|why| Failure::of_call(&why, &Peer::Server(&self.control)))
            }
            answer => answer.map_err(|why| Failure::of_call(&why, &Peer::Server(&self.control))),
        }
    }

    fn try_request(
        &mut self,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> Result<Result<HttpAnswer, ClientError>, Failure> {
        let mut client = self.connection()?;
        let key = self.key.as_deref().map(|key| ("x-api-key", key));
        let route: Vec<_> = key.into_iter().collect();
        client.set_route(&self.control.authority(), &route);
        client.set_access_token(None);
        client.set_timeout(self.patience);
        let json = [("content-type", "application/json")];
        let headers: &[_] = if body.is_empty() { &[] } else { &json };
        let answer = client.request(method, path, headers, body);
        if answer.is_ok() && !client.is_closing() {
            self.client = Some(client);
        }
        Ok(answer)
    }

    /// The kept connection, or a new one.
    fn connection(&mut self) -> Result<EnvdClient<Wire>, Failure> {
        match self.client.take() {
            Some(client) => Ok(client),
            None => Ok(EnvdClient::over(self.control.dial(DIAL)?, ANSWER)),
        }
    }

    fn refusal(&self, status: u16, answer: &HttpAnswer) -> Failure {
        let message = serde_json::from_slice::<RestError>(&answer.body);
        let message = message.map_or_else(
            |_| format!("{} responded with status {status}", self.control),
            |error| envd::guest_text(&error.message),
        );
        let failure = Failure::refused(message);
        match (status, &self.key) {
            (401, None) => Failure::new(Kind::NoKey, failure.message).with_cure(
                "set a key with --key or E2B_API_KEY; `cube-api key new NAME` makes one on the server's host",
            ),
            // A refusal for a different reason than the key.
            (403, Some(_)) if !failure.message.contains("key") => failure,
            (401 | 403, Some(_)) => failure.with_cure(
                "check --key or E2B_API_KEY; on the server's host, `cube-api key list` shows keys and their scopes",
            ),
            (404, _) => Failure {
                kind: Kind::NotFound,
                ..failure
            },
            _ => failure,
        }
    }
}

fn to_json(body: &impl Serialize) -> Result<Vec<u8>, Failure> {
    serde_json::to_vec(body)
        .map_err(|why| Failure::usage(format!("the request has no JSON form: {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(url: &str, sandbox_url: &str, domain: &str) -> ServerArgs {
        ServerArgs {
            url: Some(url.to_owned()),
            sandbox_url: Some(sandbox_url.to_owned()),
            domain: Some(domain.to_owned()),
            ..ServerArgs::default()
        }
    }

    #[test]
    fn addresses_are_found_as_the_sdks_find_them() {
        let found = |url, sandbox_url, domain| {
            let server = args(url, sandbox_url, domain).server().unwrap();
            let data = match &server.data {
                DataPlane::At(at) => at.to_string(),
                DataPlane::Domain(domain) => format!("*.{domain}"),
            };
            (server.url(), data)
        };
        let text = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(found("", "", ""), text(DEFAULT_URL, DEFAULT_URL));
        assert_eq!(
            found("http://a:1", "", "x.y"),
            text("http://a:1", "http://a:1")
        );
        assert_eq!(
            found("", "", "x.y:8443"),
            text("https://api.x.y:8443", "*.x.y:8443")
        );
        assert_eq!(
            found("http://a:1", "http://b", "x"),
            text("http://a:1", "http://b")
        );
    }

    #[test]
    fn a_key_with_a_line_end_is_refused() {
        let server = ServerArgs {
            key: Some("a\nb".to_owned()),
            ..ServerArgs::default()
        };
        assert_eq!(server.server().unwrap_err().kind, Kind::Usage);
    }

    /// The result of a request to a server that gives this response.
    fn answer(text: &'static str) -> Result<serde_json::Value, Failure> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let peer = std::thread::spawn(move || {
            use std::io::Write;
            let (mut stream, _) = listener.accept().unwrap();
            let _head = stream.read(&mut [0; 4096]).unwrap();
            stream.write_all(text.as_bytes()).unwrap();
        });
        let answer = args(&url, "", "").server().unwrap().get("/x");
        peer.join().unwrap();
        answer
    }

    #[test]
    fn what_no_server_should_answer_is_a_failure() {
        let texts = [
            "",
            "SSH-2.0-OpenSSH\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n<htm>",
        ];
        for text in texts {
            let why = answer(text).unwrap_err();
            assert_eq!(why.kind, Kind::Unreachable, "{text:?}: {why}");
        }
        let cut = answer("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}").unwrap_err();
        assert!(
            cut.kind == Kind::Refused && cut.message.ends_with("ended after 2 of 9 bytes"),
            "{cut}"
        );
        let refused = answer("HTTP/1.1 418 x\r\ncontent-length: 4\r\n\r\nnope").unwrap_err();
        assert!(refused.message.contains("status 418"), "{refused}");
        let hostile = answer(
            "HTTP/1.1 404 x\r\ncontent-length: 39\r\n\r\n{\"code\":404,\"message\":\"\\u001b[31mgone\"}",
        );
        let hostile = hostile.unwrap_err();
        assert!(
            hostile.kind == Kind::NotFound && !hostile.message.contains('\x1b'),
            "{hostile:?}"
        );
    }
}
