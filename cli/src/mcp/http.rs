//! Streamable HTTP at one path, for clients with the token, and never for the web pages of others.

use std::{
    convert::Infallible,
    fs,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use clap::Args;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Body, Bytes, Incoming},
    header::{AUTHORIZATION, HeaderValue, WWW_AUTHENTICATE},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use rmcp::transport::streamable_http_server::{
    StreamableHttpServerConfig, StreamableHttpService, session::never::NeverSessionManager,
};
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

use super::{MAX_MESSAGE, server::Tools};
use crate::failure::Failure;

const PATH: &str = "/mcp";
/// Environment variable of the token.
const TOKEN: &str = "CUBE_MCP_TOKEN";
const MIN_TOKEN: usize = 16;
const MAX_CONNECTIONS: usize = 64;
/// Timeout of a request's head, and pause after a failed accept.
const HEAD: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Args, Debug)]
#[command(next_help_heading = "HTTP")]
pub(super) struct HttpArgs {
    /// Serve HTTP at this address, for example 127.0.0.1:8900, instead of standard streams
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// File with the token that clients send as `Authorization: Bearer` [default: the variable CUBE_MCP_TOKEN]
    #[arg(long, value_name = "FILE", requires = "listen")]
    token_file: Option<PathBuf>,
    /// Host name in the clients' URL, if it is not the address or localhost; may be repeated
    #[arg(long, value_name = "NAME", requires = "listen")]
    host: Vec<String>,
}

/// A listening socket, and who may use it.
pub(super) struct Door {
    listener: TcpListener,
    token: Token,
    config: StreamableHttpServerConfig,
}

/// The hash of a token: the time of a comparison does not depend on the token's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Token([u8; 32]);

impl Token {
    fn of(text: &str) -> Self {
        Self(Sha256::digest(text).into())
    }

    fn parse(text: &str) -> Result<Self, Failure> {
        let text = text.trim();
        if text.len() >= MIN_TOKEN && text.bytes().all(|b| b.is_ascii_graphic()) {
            return Ok(Self::of(text));
        }
        Err(Failure::usage(format!(
            "the token of HTTP clients has fewer than {MIN_TOKEN} characters, or blanks"
        ))
        .with_cure(format!(
            "write the output of `openssl rand -hex 32` to --token-file or {TOKEN}"
        )))
    }

    fn is_in(&self, header: Option<&HeaderValue>) -> bool {
        let text = header
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default();
        let (scheme, token) = text.split_once(' ').unwrap_or_default();
        scheme.eq_ignore_ascii_case("bearer") && Self::of(token.trim()) == *self
    }
}

impl HttpArgs {
    /// Opens the socket. `None`: the server uses standard streams.
    pub(super) fn door(&self) -> Result<Option<Door>, Failure> {
        let Some(address) = self.listen else {
            return Ok(None);
        };
        let token = match &self.token_file {
            Some(path) => fs::read_to_string(path)
                .map_err(|why| Failure::host(format!("cannot read {}: {why}", path.display())))?,
            None => std::env::var(TOKEN).unwrap_or_default(),
        };
        let token = Token::parse(&token)?;
        let failed = |why| Failure::host(format!("cannot listen at {address}: {why}"));
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let is_clear = if address.ip().is_loopback() {
            ""
        } else {
            ", without TLS: tokens are readable on the way"
        };
        eprintln!("cube: serving MCP at http://{address}{PATH}{is_clear}");
        let local = format!("localhost:{}", address.port());
        let origins = [&local, &address.to_string()].map(|host| format!("http://{host}"));
        let hosts = [local, address.to_string()]
            .into_iter()
            .chain(self.host.iter().cloned());
        let config = StreamableHttpServerConfig::default()
            .with_legacy_session_mode(false)
            .with_max_request_body_bytes(MAX_MESSAGE)
            .with_allowed_origins(origins)
            .with_allowed_hosts(hosts);
        Ok(Some(Door {
            listener,
            token,
            config,
        }))
    }
}

/// Serves until the future is dropped.
pub(super) async fn serve(door: Door, tools: Tools) -> Result<(), Failure> {
    let listener = tokio::net::TcpListener::from_std(door.listener)
        .map_err(|why| Failure::host(format!("cannot accept connections: {why}")))?;
    let sessions = Arc::new(NeverSessionManager::default());
    let service = StreamableHttpService::new(move || Ok(tools.clone()), sessions, door.config);
    let shared = Arc::new((service, door.token));
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let permit = Arc::clone(&connections).acquire_owned().await;
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let shared = Arc::clone(&shared);
        let respond = service_fn(move |request| {
            let shared = Arc::clone(&shared);
            async move { Ok::<_, Infallible>(respond(&shared.0, &shared.1, request).await) }
        });
        tokio::spawn(async move {
            let _permit = permit;
            let mut server = http1::Builder::new();
            server.timer(TokioTimer::new()).header_read_timeout(HEAD);
            // A connection that fails concerns only its client.
            let _ended = server.serve_connection(TokioIo::new(stream), respond).await;
        });
    }
}

/// Responds to clients with the token. The requests of others end before their bodies are read, as a GET does.
async fn respond(
    service: &StreamableHttpService<Tools, NeverSessionManager>,
    token: &Token,
    mut request: Request<Incoming>,
) -> Response<impl Body<Data = Bytes, Error = Infallible> + use<>> {
    let refusal = match request.uri().path() {
        PATH if token.is_in(request.headers().get(AUTHORIZATION)) => None,
        PATH => Some(StatusCode::UNAUTHORIZED),
        _ => Some(StatusCode::NOT_FOUND),
    };
    if refusal.is_some() {
        *request.method_mut() = Method::GET;
    }
    let mut response = service.handle(request).await;
    // A wrong Host or Origin has precedence.
    if let Some(status) = refusal.filter(|_| response.status() != StatusCode::FORBIDDEN) {
        response = Response::default();
        *response.status_mut() = status;
        response
            .headers_mut()
            .insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_opens_the_door() {
        let token = Token::parse("0123456789abcdef\n").unwrap();
        let opens = |text: &str| token.is_in(HeaderValue::from_str(text).ok().as_ref());
        assert!(opens("Bearer 0123456789abcdef") && opens("bearer 0123456789abcdef"));
        for wrong in [
            "",
            "0123456789abcdef",
            "Basic 0123456789abcdef",
            "Bearer 0123456789abcde",
        ] {
            assert!(!opens(wrong), "{wrong}");
        }
        assert!(!token.is_in(None));
        for weak in ["", "short", "0123456789 abcdef"] {
            assert!(Token::parse(weak).is_err(), "{weak}");
        }
    }
}
