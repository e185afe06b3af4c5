//! This node's own requests to other nodes.

use std::time::Duration;

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, Request, header},
};
use cluster::NodeId;
use http_body_util::{BodyExt, Limited};
use hyper::StatusCode;
use model::SandboxId;
use serde::de::DeserializeOwned;
use tasks::boxed;

use super::{
    PeerError, Peers,
    transfer::{self, Fetch, FileList, TransferError},
    wire,
};
use crate::registry::check_signed;

/// Timeout of a request to another node.
pub(super) const ASK: Duration = Duration::from_secs(5);
/// Timeout of a request for which another node hashes files or sends a chunk.
const SUM: Duration = Duration::from_secs(900);
const SEND: Duration = Duration::from_secs(60);
/// How long a node may be unreachable while this one waits for files from it.
const GONE: Duration = Duration::from_secs(10);
/// Maximum size of a response in bytes.
pub(crate) const MAX_ANSWER: usize = 8 << 20;
pub(super) const MAX_REFUSAL: usize = 4 << 10;

impl Peers {
    /// Finds a node that serves requests for the template with this id or name. With `is_by_copies`, a node that has a
    /// copy qualifies while the template's home is unreachable.
    pub(crate) async fn with_template(&self, name: &str, is_by_copies: bool) -> Option<NodeId> {
        let asked = wire::TemplateName {
            name: name.to_owned(),
            is_by_copies,
        };
        let found = self.ask_all::<bool>("/cluster/template", &asked, |has| *has);
        found.await.map(|(node, _)| node)
    }

    /// Finds the sandbox whose token signed a file URL, and its node.
    pub(crate) async fn signer(
        &self,
        query: &str,
        operation: &'static str,
    ) -> Option<(NodeId, SandboxId)> {
        let asked = wire::SignedUrl {
            query: query.to_owned(),
            operation: operation.to_owned(),
        };
        check_signed(query).ok()?;
        let _asking = self.0.signed.acquire().await.ok()?;
        let found = self.ask_all::<Option<SandboxId>>("/cluster/signed", &asked, Option::is_some);
        let (node, id) = found.await?;
        Some((node, id?))
    }

    /// Sends a request to all nodes at the same time and returns the first matching response.
    async fn ask_all<T: DeserializeOwned + Send + 'static>(
        &self,
        path: &'static str,
        asked: &impl serde::Serialize,
        is_wanted: impl Fn(&T) -> bool,
    ) -> Option<(NodeId, T)> {
        let body = serde_json::to_vec(asked).ok()?;
        let mut answers = tokio::task::JoinSet::new();
        for node in self.others() {
            let (peers, request) = (self.clone(), question("POST", path, body.clone()));
            answers.spawn(boxed(async move {
                (peers.ask::<T>(&node, request).await, node)
            }));
        }
        while let Some(done) = answers.join_next().await {
            match done {
                Ok((Ok(answer), node)) if is_wanted(&answer) => return Some((node, answer)),
                Ok((Err(why), _)) => {
                    tracing::debug!(why = %model::chain(&why), "no response from another node")
                }
                Ok((Ok(_), _)) | Err(_) => {}
            }
        }
        None
    }

    /// Sends a notification to all other nodes at the same time and returns those that did not confirm it, with
    /// reasons.
    pub(super) async fn unconfirmed<F>(
        &self,
        tell: impl Fn(Self, NodeId) -> F,
    ) -> Vec<(NodeId, String)>
    where
        F: Future<Output = Result<(), String>> + Send + 'static,
    {
        let mut told = tokio::task::JoinSet::new();
        for node in self.others() {
            let answer = tell(self.clone(), node.clone());
            told.spawn(boxed(
                async move { answer.await.map_err(|why| (node, why)) },
            ));
        }
        let mut unconfirmed = Vec::new();
        while let Some(done) = told.join_next().await {
            if let Ok(Err(by)) = done {
                unconfirmed.push(by);
            }
        }
        unconfirmed
    }

    /// Lists the files that a node offers under a key.
    ///
    /// # Errors
    /// Returns [`TransferError::NotOffered`], or the errors of the request.
    pub(crate) async fn list_files(
        &self,
        node: &NodeId,
        key: &str,
    ) -> Result<FileList, TransferError> {
        let question = question("GET", &format!("/cluster/files/{key}"), Vec::new());
        let (status, bytes) = self.read_long(node, question, MAX_ANSWER, SUM).await?;
        if status == StatusCode::NOT_FOUND {
            let (node, key) = (node.clone(), key.to_owned());
            return Err(TransferError::NotOffered { node, key });
        }
        Ok(answer_of(node, status, &bytes)?)
    }

    /// Fetches the files that a node offers into a directory that nothing else uses. Returns the number of bytes
    /// received. Continues from files that an interrupted attempt left there.
    ///
    /// # Errors
    /// Returns [`TransferError`]. Files fetched so far are kept for the next attempt.
    pub(crate) async fn fetch_files(
        &self,
        node: &NodeId,
        key: &str,
        list: &FileList,
        dir: &std::path::Path,
    ) -> Result<u64, TransferError> {
        let source = Remote {
            peers: self.clone(),
            node: node.clone(),
        };
        let fetch = Fetch { key, list, dir };
        fetch.run(&source, &self.0.rate, self.0.transfers).await
    }

    /// Sends one of this node's own requests to another node.
    ///
    /// # Errors
    /// Returns [`PeerError`] if no response of the expected form arrives in time.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        node: &NodeId,
        request: Request<Body>,
    ) -> Result<T, PeerError> {
        let (status, bytes) = self.read(node, request, MAX_ANSWER, ASK).await?;
        answer_of(node, status, &bytes)
    }

    /// Like [`Self::read`], for responses that may take long. A server that is stopped (SIGSTOP) keeps its connections
    /// but loses its lease, so this gives up after [`GONE`] without a lease.
    pub(super) async fn read_long(
        &self,
        node: &NodeId,
        request: Request<Body>,
        most: usize,
        limit: Duration,
    ) -> Result<(StatusCode, Bytes), PeerError> {
        self.while_there(node, GONE, self.read(node, request, most, limit))
            .await
    }

    /// Sends a request and reads a response of at most `most` bytes within `limit`.
    pub(super) async fn read(
        &self,
        node: &NodeId,
        request: Request<Body>,
        most: usize,
        limit: Duration,
    ) -> Result<(StatusCode, Bytes), PeerError> {
        let asked = async {
            let response = self.0.client.send(node, request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), most).collect().await;
            let body = body.map_err(|why| malformed(node, why.to_string()))?;
            Ok((status, body.to_bytes()))
        };
        let late = |_| PeerError::Late {
            node: node.clone(),
            limit_s: limit.as_secs(),
        };
        tokio::time::timeout(limit, asked).await.map_err(late)?
    }
}

fn malformed(node: &NodeId, why: String) -> PeerError {
    PeerError::Malformed {
        node: node.clone(),
        why,
    }
}

pub(super) fn answer_of<T: DeserializeOwned>(
    node: &NodeId,
    status: StatusCode,
    bytes: &Bytes,
) -> Result<T, PeerError> {
    if !status.is_success() {
        let text: String = String::from_utf8_lossy(bytes).chars().take(300).collect();
        return Err(malformed(node, format!("status {status}: {text}")));
    }
    serde_json::from_slice(bytes).map_err(|why| malformed(node, why.to_string()))
}

/// A node from which files are fetched.
#[derive(Clone)]
struct Remote {
    peers: Peers,
    node: NodeId,
}

impl transfer::Source for Remote {
    fn node(&self) -> &NodeId {
        &self.node
    }

    async fn get(&self, path: String, most: usize) -> Result<(StatusCode, Bytes), PeerError> {
        let question = question("GET", &path, Vec::new());
        // Refusals carry a text.
        let most = most.max(MAX_REFUSAL);
        self.peers.read_long(&self.node, question, most, SEND).await
    }
}

/// A request to another node, for [`Peers::ask`].
pub(crate) fn question(method: &str, path: &str, body: Vec<u8>) -> Request<Body> {
    let mut request = Request::new(Body::from(body));
    *request.method_mut() = method.parse().unwrap_or_default();
    *request.uri_mut() = path.parse().unwrap_or_default();
    let json = HeaderValue::from_static("application/json");
    let headers = request.headers_mut();
    headers.insert(header::CONTENT_TYPE, json);
    headers.insert(header::HOST, HeaderValue::from_static("node.cube.internal"));
    request
}
