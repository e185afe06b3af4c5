//! ```text
//! listener ─► accept ─► connection: flow? ─► ClientHello ─► name allowed? rule? ─┬─► splice     bytes unread
//!               │          │                                                    └─► terminate ─┐
//!               │          └─ port 80 ───────────────────────────────────────────► session ◄────┘
//!               │                                                 each request: target, rule, exchange ─► upstream
//!             sandboxes    limits by sandbox; cut              minter   leaf certificates
//!             link         the control socket: questions, answers, records
//! ```
//! Each connection belongs to one task, which owns all of its resources. Dropping the task ends the connection
//! completely, which is how `Cut` works.
//!
//! What must never happen: a connection to an address other than the flow's; a rule's header in a request for a name
//! other than the rule's; a request whose name was not checked; a value of a rule in a message, a record or an error.

pub(crate) mod accept;
mod answer;
mod body;
mod connection;
mod exchange;
mod head;
mod link;
mod minter;
mod record;
mod sandboxes;
mod session;
mod socks;
mod splice;
mod stream;
mod target;
mod tasks;
mod tunnel;
mod upstream;

use std::{net::TcpListener, os::unix::net::UnixStream, sync::Arc, time::Duration};

use rustls::{ClientConfig, RootCertStore, crypto::ring};

use link::{Link, LinkError};
use minter::{Minter, MinterError};
use sandboxes::Sandboxes;

/// Timeout for a ClientHello, a handshake, the head of a request, a connection to a server, or a response of
/// `cube-api`.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// Idle timeout of a connection whose requests the proxy reads.
const IDLE_TIME: Duration = Duration::from_secs(5 * 60);
/// Idle timeout of spliced connections and WebSockets. The eBPF programs remove flows without packets after the same
/// time.
const TUNNEL_IDLE_TIME: Duration = Duration::from_secs(60 * 60);
/// How long connections may continue after the control socket has closed.
const DRAIN_TIME: Duration = Duration::from_secs(60 * 60);

/// Limits and ports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) https_port: u16,
    pub(crate) connections: u32,
    pub(crate) sandbox_connections: u32,
    /// In a second.
    pub(crate) sandbox_requests: u32,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ProxyError {
    #[error("cannot read from the control socket")]
    Link(#[from] LinkError),
    #[error("cannot use the certificate authority in the start message")]
    Authority(#[from] MinterError),
    #[error("cannot use the listening socket")]
    Listener(#[source] std::io::Error),
    #[error("cannot configure TLS")]
    Tls(#[from] rustls::Error),
}

/// State that connections share.
pub(crate) struct Shared {
    settings: Settings,
    link: Arc<Link>,
    minter: Minter,
    /// Without ALPN protocols, because each connection to a server sets its own.
    client: ClientConfig,
}

/// The certificate authorities that the host trusts, or the ones in `SSL_CERT_FILE`.
pub(crate) fn host_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    for error in found.errors {
        tracing::warn!("cannot read the host's certificate authorities: {error}");
    }
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        tracing::warn!(
            "no certificate authorities found: install ca-certificates, or requests with rules over TLS fail"
        );
    }
    roots
}

/// Serves until the control socket has closed and all connections have ended.
pub(crate) async fn run(
    control: UnixStream,
    listener: TcpListener,
    roots: RootCertStore,
    settings: Settings,
) -> Result<(), ProxyError> {
    let sandboxes = Sandboxes::new(settings);
    let (link, authority) = link::begin(control, sandboxes).await?;
    let shared = Shared {
        settings,
        minter: Minter::new(&authority)?,
        client: client_config(roots)?,
        link,
    };
    drop(authority);
    let listener = tokio::net::TcpListener::from_std(listener).map_err(ProxyError::Listener)?;
    accept::run(listener, Arc::new(shared)).await;
    Ok(())
}

fn client_config(roots: RootCertStore) -> Result<ClientConfig, rustls::Error> {
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    // A resumed session would belong to another connection, perhaps another sandbox's.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}
