//! One accepted connection: identifies its sandbox, and decides how to handle it.

use std::{io, net::SocketAddr, sync::Arc};

use egress::{
    control::{Ask, Flow, RuleOutcome},
    framing::MAX_HEAD,
    hello::{ClientHello, HelloError, HelloReader},
    name::{HostName, HostPort},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, timeout, timeout_at},
};
use tokio_rustls::TlsAcceptor;

use super::{
    HEAD_TIME, Shared,
    link::Admission,
    record::{Record, log_unanswered, refuse_connection},
    sandboxes::Membership,
    session::{self, Security, Session},
    splice,
    stream::Guest,
    tasks::Tasks,
    upstream::{Dialer, Protocol, Upstream, Wire},
};

/// A fatal alert `access_denied` (RFC 8446, section 6): the guest's program shows it.
const ACCESS_DENIED: [u8; 7] = [21, 3, 3, 0, 2, 2, 49];

/// Reason for closing a connection that had a place.
const DISPLACED: &str = "closed: all connections of the proxy were taken, and this one of the sandbox with most was idle for the longest time";

/// Serves the connection until it ends, its sandbox is cut, or another sandbox needs its place.
pub(crate) async fn serve(shared: &Arc<Shared>, guest: TcpStream, peer: SocketAddr) {
    let admission = match shared.link.flow(peer).await {
        Ok(Some(admission)) => admission,
        // There is no information for a record.
        Ok(None) => return,
        Err(error) => {
            log_unanswered(peer, &error);
            return;
        }
    };
    let Admission { flow, membership } = admission;
    let membership = match membership {
        Ok(membership) => membership,
        Err(full) => {
            refuse_connection(&shared.link, &flow, &full.to_string());
            splice::reset(&guest);
            return;
        }
    };
    let _ = guest.set_nodelay(true);
    let (cut, place) = (membership.cut(), membership.place());
    let closed = flow.clone();
    let (tasks, _owner) = Tasks::new();
    let connection = Connection {
        record: Record::new(&shared.link, &flow),
        shared,
        flow,
        peer,
        membership,
        guest,
        tasks,
        first: Vec::new(),
    };
    tokio::select! {
        biased;
        () = cut => {}
        () = place.closed() => refuse_connection(&shared.link, &closed, DISPLACED),
        () = connection.run() => {}
    }
}

struct Connection<'a> {
    shared: &'a Arc<Shared>,
    flow: Flow,
    peer: SocketAddr,
    membership: Membership,
    record: Record,
    guest: TcpStream,
    tasks: Tasks,
    /// Bytes that were read from the guest.
    first: Vec<u8>,
}

/// The treatment of a connection.
enum Decision {
    /// It passes unread.
    Splice,
    /// Its requests are read.
    Plain,
    Tls(HostName, ClientHello),
    Refuse(String),
    /// The guest has closed it before the first byte.
    Ended,
}

impl Connection<'_> {
    async fn run(mut self) {
        let is_tls = self.flow.remote.port() == self.shared.settings.https_port;
        let decision = if self.flow.is_unread {
            Decision::Splice
        } else if is_tls {
            self.decide_tls().await
        } else {
            self.decide_plain().await
        };
        match decision {
            Decision::Splice => self.splice().await,
            Decision::Plain => self.plain().await,
            Decision::Tls(name, hello) => self.terminate(name, &hello).await,
            Decision::Refuse(reason) => self.refuse(&reason, is_tls).await,
            Decision::Ended => self.record.discard(),
        }
    }

    async fn decide_tls(&mut self) -> Decision {
        let hello = timeout(HEAD_TIME, self.read_hello()).await;
        // Connections that rules by address also allow may use any protocol.
        let admitted = self.flow.admitted_by_address;
        let refuse = |reason: String| {
            if admitted {
                Decision::Splice
            } else {
                Decision::Refuse(reason)
            }
        };
        let hello = match hello {
            Err(_) => return refuse("the ClientHello took too long".to_owned()),
            Ok(Err(_)) if self.first.is_empty() && !admitted => return Decision::Ended,
            Ok(Err(error)) => return refuse(error.to_string()),
            Ok(Ok(hello)) => hello,
        };
        let Some(name) = hello.name.clone() else {
            return refuse("the ClientHello has no server name".to_owned());
        };
        self.record.name(name.as_str());
        if !self.is_answered(&name) {
            return refuse(format!("{name} was not resolved to this address"));
        }
        let link = &self.shared.link;
        match link.rule(self.peer, &name, Ask::Existence).await {
            Ok(RuleOutcome::None) => Decision::Splice,
            Ok(
                RuleOutcome::Headers { .. }
                | RuleOutcome::NeedsTls { .. }
                | RuleOutcome::Failed { .. },
            ) => Decision::Tls(name, hello),
            Err(error) => Decision::Refuse(format!("the rule for {name} is not known: {error}")),
        }
    }

    /// Without TLS each request names its host, so a connection that only a name allows is read throughout.
    async fn decide_plain(&mut self) -> Decision {
        if !self.flow.admitted_by_address {
            return Decision::Plain;
        }
        match timeout(HEAD_TIME, self.read_host()).await {
            Ok(Some(name)) if self.is_answered(&name) => Decision::Plain,
            Ok(_) | Err(_) => Decision::Splice,
        }
    }

    fn dialer(&self) -> Dialer {
        Dialer::of(self.shared, &self.flow, self.peer)
    }

    fn is_answered(&self, name: &HostName) -> bool {
        self.flow
            .names
            .iter()
            .any(|answered| answered == name.as_str())
    }

    async fn read_hello(&mut self) -> Result<ClientHello, HelloError> {
        let mut reader = HelloReader::default();
        loop {
            let before = self.first.len();
            let read = self.read_more(egress::hello::MAX_HELLO).await;
            if !matches!(read, Ok(1..)) {
                let ended = rustls::Error::General("the connection has ended".to_owned());
                return Err(HelloError::NotTls(ended));
            }
            if let Some(hello) = reader.read(&self.first[before..])? {
                return Ok(hello);
            }
        }
    }

    /// The host of the first request. `None`: the connection is not HTTP/1, or the request has no usable host.
    async fn read_host(&mut self) -> Option<HostName> {
        loop {
            if !matches!(self.read_more(MAX_HEAD).await, Ok(1..)) {
                return None;
            }
            match first_host(&self.first) {
                FirstHost::Incomplete => {}
                FirstHost::None => return None,
                FirstHost::Name(name) => return Some(name),
            }
        }
    }

    /// Reads available bytes, up to a limit for the total. Returns 0 at the limit and at the end.
    async fn read_more(&mut self, limit: usize) -> io::Result<usize> {
        let room = limit.saturating_sub(self.first.len()).min(16 << 10);
        if room == 0 {
            return Ok(0);
        }
        let mut part = (&mut self.guest).take(room as u64);
        part.read_buf(&mut self.first).await
    }

    async fn splice(mut self) {
        match self.dialer().connect().await {
            Ok(server) => {
                let traffic = self.record.traffic();
                let first = std::mem::take(&mut self.first);
                let (guest, activity) = (&mut self.guest, self.membership.activity());
                match server {
                    Wire::Tcp(mut server) => {
                        splice::run(guest, &mut server, &first, &traffic, &activity).await;
                    }
                    Wire::Tls(server) => {
                        splice::run_in_tls(guest, *server, &first, &traffic, &activity).await;
                    }
                }
            }
            Err(error) => {
                self.record.refused(&error.to_string());
                splice::reset(&self.guest);
            }
        }
    }

    async fn plain(self) {
        let dialer = self.dialer();
        let upstream = Upstream::plain(dialer, &self.tasks);
        let activity = self.membership.activity();
        let stream = Guest::new(self.first.into(), self.guest, Arc::clone(&activity));
        self.record.discard();
        let session = Session::new(
            self.shared,
            self.flow,
            self.peer,
            self.membership,
            Security::Plain,
            upstream,
        );
        session::serve(session, stream, &activity, &self.tasks).await;
    }

    /// Connects to the server first, because the guest is offered the HTTP version that the server supports.
    async fn terminate(mut self, name: HostName, hello: &ClientHello) {
        let offered = offered(&hello.protocols);
        let deadline = Instant::now() + HEAD_TIME;
        let shared = self.shared;
        let upstream =
            Upstream::tls(self.dialer(), &name, &shared.client, &offered, &self.tasks).await;
        let upstream = match upstream {
            Ok(upstream) => upstream,
            Err(error) => return self.refuse(&error.to_string(), true).await,
        };
        let mut protocols = Vec::new();
        if !hello.protocols.is_empty() {
            protocols.push(upstream.protocol().alpn().to_vec());
        }
        let config = match shared.minter.config(&name, protocols) {
            Ok(config) => config,
            Err(error) => return self.refuse(&error.to_string(), true).await,
        };
        let activity = self.membership.activity();
        let stream = Guest::new(self.first.into(), self.guest, Arc::clone(&activity));
        let deadline = deadline.max(Instant::now() + HEAD_TIME / 2);
        let accepted =
            timeout_at(deadline, TlsAcceptor::from(Arc::new(config)).accept(stream)).await;
        let stream = match accepted {
            Ok(Ok(stream)) => stream,
            // A guest without the authority's certificate fails here.
            Ok(Err(error)) => {
                return self
                    .record
                    .refused(&format!("the TLS handshake of the guest failed: {error}"));
            }
            Err(_) => {
                return self
                    .record
                    .refused("the TLS handshake of the guest took too long");
            }
        };
        self.record.discard();
        let security = Security::Tls { name };
        let session = Session::new(
            shared,
            self.flow,
            self.peer,
            self.membership,
            security,
            upstream,
        );
        session::serve(session, stream, &activity, &self.tasks).await;
    }

    async fn refuse(mut self, reason: &str, is_tls: bool) {
        self.record.refused(reason);
        if is_tls {
            let _ = timeout(HEAD_TIME, self.guest.write_all(&ACCESS_DENIED)).await;
        }
        // If bytes of the guest are unread, the close is a reset.
        let _ = self.guest.shutdown().await;
    }
}

/// The HTTP versions that the guest's client offers, in the proxy's order.
fn offered(protocols: &[Vec<u8>]) -> Vec<Protocol> {
    let mut offered = vec![Protocol::Http2, Protocol::Http1];
    offered.retain(|protocol| protocols.iter().any(|name| name == protocol.alpn()));
    if offered.is_empty() {
        offered.push(Protocol::Http1);
    }
    offered
}

enum FirstHost {
    Incomplete,
    None,
    Name(HostName),
}

/// Only for connections that pass in any case. If a name is found here, every request is read.
fn first_host(bytes: &[u8]) -> FirstHost {
    let is_method = bytes
        .iter()
        .take_while(|byte| **byte != b' ')
        .all(u8::is_ascii_uppercase);
    if !is_method {
        return FirstHost::None;
    }
    let Some(end) = bytes.windows(4).position(|part| part == b"\r\n\r\n") else {
        return FirstHost::Incomplete;
    };
    let head = String::from_utf8_lossy(&bytes[..end]);
    let host = head.split("\r\n").skip(1).find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("host").then_some(value.trim())
    });
    match host.map(HostPort::parse) {
        Some(Ok(host)) => FirstHost::Name(host.name),
        Some(Err(_)) | None => FirstHost::None,
    }
}
