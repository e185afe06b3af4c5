//! etcd over gRPC.
//!
//! Each request has a deadline and is sent to one etcd member. After a failure, the next request is sent to the next
//! member. Requests carry `hasleader`: a member that has lost contact to its leader fails them and ends a watch,
//! instead of returning stale data.

use std::{
    fs,
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use tokio::{sync::mpsc, time::timeout};
use tokio_stream::StreamExt;
use tonic::{
    Code, Request as Grpc, Status, Streaming,
    client::Grpc as Client,
    codegen::http::uri::PathAndQuery,
    metadata::MetadataValue,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};
use tonic_prost::ProstCodec;

use crate::{
    keys::PREFIX,
    store::{Answer, Change, Entry, Fault, LeaseId, Request, Txn, Watched, When, Write},
};

mod accounts;
mod version;
mod wire;

pub use accounts::AccountsError;
pub(crate) use accounts::sync;

pub(crate) use version::check_version;

/// How to reach etcd.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// `https://HOST:2379`, or `http://` if the network is trusted. The etcd member on this host comes first.
    pub endpoints: Vec<String>,
    pub tls: Option<TlsFiles>,
}

/// PEM files: the authority's certificate, and a client's.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    pub authority: PathBuf,
    /// `None`: the client presents no certificate.
    pub identity: Option<IdentityFiles>,
}

/// Certificate and key, signed by the cluster's authority.
#[derive(Clone, Debug)]
pub struct IdentityFiles {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum EtcdConfigError {
    #[error("no address of etcd")]
    NoEndpoint,
    #[error("{0:?} is not an address of etcd such as https://10.0.0.1:2379")]
    Address(String),
    #[error("cannot read {path}")]
    File {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the certificates for etcd cannot be used")]
    Tls(#[source] tonic::transport::Error),
}

/// Timeout of requests and of connection attempts.
const DEADLINE: Duration = Duration::from_secs(3);
const CONNECT: Duration = Duration::from_secs(2);
/// A connection that does not respond to a ping for this long is closed, together with its watch.
const PING: Duration = Duration::from_secs(4);
/// A list of a thousand nodes with a hundred templates has about 30 MiB.
const MAX_MESSAGE: usize = 128 << 20;

/// Connections to the members of an etcd cluster.
#[derive(Debug)]
pub(crate) struct Etcd {
    members: Vec<(String, Channel)>,
    current: AtomicUsize,
}

impl Etcd {
    /// Reads the certificates. Connections are opened on demand.
    pub(crate) fn open(config: &EtcdConfig) -> Result<Self, EtcdConfigError> {
        let tls = config.tls.as_ref().map(client_tls).transpose()?;
        let mut members = Vec::new();
        for address in &config.endpoints {
            let wrong = |_| EtcdConfigError::Address(address.clone());
            let mut endpoint = Endpoint::from_shared(address.clone())
                .map_err(wrong)?
                .connect_timeout(CONNECT)
                .http2_keep_alive_interval(PING)
                .keep_alive_timeout(PING)
                .keep_alive_while_idle(true)
                .tcp_nodelay(true);
            if let Some(tls) = &tls {
                endpoint = endpoint
                    .tls_config(tls.clone())
                    .map_err(EtcdConfigError::Tls)?;
            }
            members.push((address.clone(), endpoint.connect_lazy()));
        }
        if members.is_empty() {
            return Err(EtcdConfigError::NoEndpoint);
        }
        let current = AtomicUsize::new(0);
        Ok(Self { members, current })
    }

    pub(crate) fn addresses(&self) -> String {
        let addresses: Vec<&str> = self.members.iter().map(|(a, _)| a.as_str()).collect();
        addresses.join(", ")
    }

    /// The version of each member that responds, and the error of the last one that does not.
    pub(crate) async fn versions(&self) -> (Vec<String>, Option<String>) {
        let (mut versions, mut failure) = (Vec::new(), None);
        for (address, channel) in &self.members {
            let status = wire::StatusRequest {};
            let path = "/etcdserverpb.Maintenance/Status";
            match unary::<_, wire::StatusResponse>(channel, path, status).await {
                Ok(status) => versions.push(status.version),
                Err(status) => failure = Some(format!("{address}: {}", reason(&status))),
            }
        }
        (versions, failure)
    }

    pub(crate) async fn ask(&self, request: Request) -> Result<Answer, Fault> {
        let (at, channel) = self.member();
        let address = &self.members[at].0;
        let mut answer = perform(channel, request.clone()).await;
        if answer.as_ref().is_err_and(is_overtaken) {
            answer = perform(channel, request).await;
        }
        answer.map_err(|status| {
            tracing::debug!(etcd = address, "request failed: {}", reason(&status));
            self.turn_from(at);
            fault(&status)
        })
    }

    /// Watches the prefix from a revision until the watch ends or the receiver is dropped.
    pub(crate) async fn watch(&self, from: u64, reports: mpsc::Sender<Watched>) {
        let (at, channel) = self.member();
        let address = &self.members[at].0;
        let ended = match follow(channel, from, &reports).await {
            Ok(ended) => ended,
            Err(status) => {
                tracing::debug!(etcd = address, "watch ended: {}", reason(&status));
                self.turn_from(at);
                Watched::Broken
            }
        };
        // If the receiver has been dropped, another watch has replaced this one.
        let _ = reports.send(ended).await;
    }

    /// The member that currently gets the requests.
    fn member(&self) -> (usize, &Channel) {
        let at = self.current.load(Ordering::Relaxed) % self.members.len();
        (at, &self.members[at].1)
    }

    fn turn_from(&self, at: usize) {
        let next = at + 1;
        let (order, same) = (Ordering::Relaxed, Ordering::Relaxed);
        // If this fails, another request has already switched members.
        let _ = (self.current).compare_exchange(at, next % self.members.len(), order, same);
    }
}

fn client_tls(files: &TlsFiles) -> Result<ClientTlsConfig, EtcdConfigError> {
    let read = |path: &PathBuf| {
        fs::read(path).map_err(|source| EtcdConfigError::File {
            path: path.clone(),
            source,
        })
    };
    let authority = Certificate::from_pem(read(&files.authority)?);
    let config = ClientTlsConfig::new().ca_certificate(authority);
    Ok(match &files.identity {
        Some(IdentityFiles { certificate, key }) => {
            config.identity(Identity::from_pem(read(certificate)?, read(key)?))
        }
        None => config,
    })
}

fn reason(status: &Status) -> String {
    model::chain(status)
}

/// Whether etcd has refused a request because its users have changed since the request arrived.
fn is_overtaken(status: &Status) -> bool {
    status.code() == Code::InvalidArgument && status.message().contains("auth store is old")
}

/// A request counts as without effect only if etcd itself has refused it.
fn fault(status: &Status) -> Fault {
    match status.code() {
        Code::NotFound => Fault::NoLease,
        Code::InvalidArgument
        | Code::FailedPrecondition
        | Code::OutOfRange
        | Code::ResourceExhausted
        | Code::PermissionDenied
        | Code::Unauthenticated
        | Code::Unimplemented => Fault::Refused,
        _ => Fault::Unknown,
    }
}

async fn perform(channel: &Channel, request: Request) -> Result<Answer, Status> {
    match request {
        Request::List => {
            let request = wire::RangeRequest {
                key: PREFIX.as_bytes().to_vec(),
                range_end: prefix_end(PREFIX.as_bytes()),
            };
            let range = range(channel, request).await?;
            let revision = revision_in(range.header);
            let entries = range.kvs.into_iter().map(entry).collect();
            Ok(Answer::List { revision, entries })
        }
        Request::Get(key) => {
            let request = wire::RangeRequest {
                key: key.to_string().into_bytes(),
                range_end: Vec::new(),
            };
            let range = range(channel, request).await?;
            let revision = revision_in(range.header);
            let entry = range.kvs.into_iter().next().map(entry);
            Ok(Answer::Got { revision, entry })
        }
        Request::Txn(txn) => {
            let path = "/etcdserverpb.KV/Txn";
            let done: wire::TxnResponse = unary(channel, path, txn_request(txn)).await?;
            Ok(Answer::Txn {
                revision: revision_in(done.header),
                succeeded: done.succeeded,
            })
        }
        Request::Grant { ttl_s } => {
            let ttl = i64::try_from(ttl_s).unwrap_or(i64::MAX);
            let request = wire::LeaseGrantRequest { ttl };
            let path = "/etcdserverpb.Lease/LeaseGrant";
            let granted: wire::LeaseGrantResponse = unary(channel, path, request).await?;
            Ok(Answer::Granted(LeaseId(granted.id)))
        }
        Request::Renew(LeaseId(id)) => {
            let alive = timeout(DEADLINE, renew(channel, id)).await;
            let alive = alive.map_err(|_| late())??;
            Ok(Answer::Renewed { alive })
        }
        Request::Revoke(LeaseId(id)) => {
            let request = wire::LeaseRevokeRequest { id };
            let path = "/etcdserverpb.Lease/LeaseRevoke";
            let _: wire::LeaseRevokeResponse = unary(channel, path, request).await?;
            Ok(Answer::Revoked)
        }
    }
}

async fn range(
    channel: &Channel,
    request: wire::RangeRequest,
) -> Result<wire::RangeResponse, Status> {
    unary(channel, "/etcdserverpb.KV/Range", request).await
}

async fn unary<Q, A>(channel: &Channel, path: &'static str, message: Q) -> Result<A, Status>
where
    Q: prost::Message + 'static,
    A: prost::Message + Default + 'static,
{
    let call = async {
        let mut client = client(channel).await?;
        let path = PathAndQuery::from_static(path);
        let codec = ProstCodec::<Q, A>::default();
        let answer = client.unary(with_leader(message), path, codec).await?;
        Ok(answer.into_inner())
    };
    timeout(DEADLINE, call).await.map_err(|_| late())?
}

/// One renewal. etcd responds to each message of the stream with one message.
async fn renew(channel: &Channel, id: i64) -> Result<bool, Status> {
    let mut client = client(channel).await?;
    let requests = tokio_stream::once(wire::LeaseKeepAliveRequest { id });
    let path = PathAndQuery::from_static("/etcdserverpb.Lease/LeaseKeepAlive");
    let codec = ProstCodec::<_, wire::LeaseKeepAliveResponse>::default();
    let answers = client.streaming(with_leader(requests), path, codec).await?;
    let answer = answers.into_inner().message().await?;
    let answer =
        answer.ok_or_else(|| Status::unavailable("the stream ended without a response"))?;
    Ok(answer.ttl > 0)
}

async fn follow(
    channel: &Channel,
    from: u64,
    reports: &mpsc::Sender<Watched>,
) -> Result<Watched, Status> {
    let open = async {
        let mut client = client(channel).await?;
        let create = wire::WatchRequest {
            create: Some(wire::WatchCreateRequest {
                key: PREFIX.as_bytes().to_vec(),
                range_end: prefix_end(PREFIX.as_bytes()),
                start_revision: signed(from),
            }),
        };
        // Dropping the request stream would end the watch.
        let requests = tokio_stream::once(create).chain(tokio_stream::pending());
        let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
        let codec = ProstCodec::<_, wire::WatchResponse>::default();
        let answers = client.streaming(with_leader(requests), path, codec).await?;
        Ok::<Streaming<wire::WatchResponse>, Status>(answers.into_inner())
    };
    let mut answers = timeout(DEADLINE, open).await.map_err(|_| late())??;
    while let Some(answer) = answers.message().await? {
        if answer.compact_revision > 0 {
            return Ok(Watched::Compacted);
        }
        if answer.canceled {
            return Ok(Watched::Broken);
        }
        let mut report = Vec::new();
        if answer.created {
            let revision = revision_in(answer.header);
            report.push(Watched::Started { revision });
        }
        let changes: Vec<Change> = answer.events.into_iter().filter_map(change).collect();
        if !changes.is_empty() {
            report.push(Watched::Changes(changes));
        }
        for one in report {
            if reports.send(one).await.is_err() {
                return Ok(Watched::Broken);
            }
        }
    }
    Ok(Watched::Broken)
}

async fn client(channel: &Channel) -> Result<Client<Channel>, Status> {
    let mut client = Client::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE);
    let ready = client.ready().await;
    ready.map_err(|error| Status::unavailable(model::chain(&error)))?;
    Ok(client)
}

fn with_leader<T>(message: T) -> Grpc<T> {
    let mut request = Grpc::new(message);
    let required = MetadataValue::from_static("true");
    request.metadata_mut().insert("hasleader", required);
    request
}

fn late() -> Status {
    Status::deadline_exceeded(format!("no response within {DEADLINE:?}"))
}

fn txn_request(txn: Txn) -> wire::TxnRequest {
    let compare = |when| {
        let (key, target, with) = match when {
            When::Absent(key) => (key, wire::Target::Version, wire::Compared::Version(0)),
            When::Revision(key, revision) => {
                let with = wire::Compared::ModRevision(signed(revision));
                (key, wire::Target::Mod, with)
            }
        };
        wire::Compare {
            target: target.into(),
            key: key.to_string().into_bytes(),
            with: Some(with),
        }
    };
    let operation = |write| match write {
        Write::Put { key, value, lease } => wire::Operation::Put(wire::PutRequest {
            key: key.to_string().into_bytes(),
            value,
            lease: lease.map_or(0, |LeaseId(id)| id),
        }),
        Write::Delete(key) => wire::Operation::Delete(wire::DeleteRangeRequest {
            key: key.to_string().into_bytes(),
        }),
    };
    let request = |write| wire::RequestOp {
        request: Some(operation(write)),
    };
    wire::TxnRequest {
        compare: txn.when.into_iter().map(compare).collect(),
        success: txn.then.into_iter().map(request).collect(),
    }
}

fn entry(kv: wire::KeyValue) -> Entry {
    Entry {
        // Keys that are not text do not belong to this program.
        key: String::from_utf8_lossy(&kv.key).into_owned(),
        value: kv.value,
        revision: unsigned(kv.mod_revision),
    }
}

fn change(event: wire::Event) -> Option<Change> {
    let is_delete = event.r#type == i32::from(wire::EventType::Delete);
    let entry = entry(event.kv?);
    Some(if is_delete {
        Change::Delete {
            key: entry.key,
            revision: entry.revision,
        }
    } else {
        Change::Put(entry)
    })
}

/// The first key after all keys with the prefix.
fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

fn revision_in(header: Option<wire::ResponseHeader>) -> u64 {
    header.map_or(0, |header| unsigned(header.revision))
}

/// Revisions are positive numbers below 2^63.
fn unsigned(revision: i64) -> u64 {
    u64::try_from(revision).unwrap_or(0)
}

fn signed(revision: u64) -> i64 {
    i64::try_from(revision).unwrap_or(i64::MAX)
}
