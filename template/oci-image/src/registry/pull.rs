//! Pulls an image: manifest, config and layers into the store.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering},
};

use hyper::{
    StatusCode,
    header::{CONTENT_LENGTH, CONTENT_TYPE},
};
use rustls::ClientConfig;
use tokio::{sync::Semaphore, time::timeout};

use super::{
    Credentials, EndpointError, Registries, Target,
    auth::Session,
    http::{Connector, HttpError},
    join::join_all,
};
use crate::{
    config::{Config, ConfigError, MAX_CONFIG},
    convert::ConvertError,
    digest::Digest,
    limits::Limits,
    manifest::{
        ACCEPTED, Compression, Descriptor, Document, MAX_MANIFEST, Manifest, ManifestError,
    },
    program::Program,
    reference::Reference,
    store::{Draft, Lease, Object, Store, StoreError},
};

/// Maximum number of layers that are pulled at the same time.
const PARALLEL: usize = 3;
/// Maximum number of requests for a blob if connections break or stall.
const ATTEMPTS: usize = 3;

/// Blobs of at least this size are hashed in a helper process, if one is configured.
const LARGE: u64 = 1 << 20;

/// Pulls images.
pub struct Client {
    registries: Registries,
    connector: Connector,
    program: Option<Program>,
}

/// An image whose blobs are in the store.
#[derive(Debug)]
pub struct Pulled {
    /// Digest of the manifest for linux/amd64.
    pub digest: Digest,
    pub config: Config,
    /// Lowest layer first.
    pub layers: Vec<Layer>,
}

/// Whether a pull needs the layers of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    Layers,
    /// Only the config: [`Pulled::layers`] is empty.
    Config,
}

/// Source of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Store,
    Registry,
}

/// Receives the progress of a pull.
pub trait Follow: Sync {
    /// The manifest was received: its digest, and the number and total size of the layers in bytes.
    fn found(&self, digest: &Digest, layers: usize, bytes: u64) -> Need;
    /// A layer is in the store. Its digest, its size in bytes and its source.
    fn layer(&self, digest: &Digest, bytes: u64, origin: Origin);
}

/// Ignores progress and needs the layers.
impl Follow for () {
    fn found(&self, _: &Digest, _: usize, _: u64) -> Need {
        Need::Layers
    }

    fn layer(&self, _: &Digest, _: u64, _: Origin) {}
}

#[derive(Debug)]
pub struct Layer {
    pub blob: Lease,
    pub compression: Compression,
    /// Digest of the unpacked layer.
    pub diff_id: Digest,
}

#[derive(Debug, thiserror::Error)]
pub enum PullError {
    #[error("image {0:?} not found: the image or tag does not exist in the registry")]
    NotFound(String),
    #[error("{host} denies access to the image: check the registry's credentials")]
    Unauthorized { host: String },
    #[error("{host} requires an unsupported authentication method")]
    Challenge { host: String },
    #[error("{host} limits the rate of requests: try again later, or use a mirror")]
    RateLimited { host: String },
    #[error("{host} returned status {status}")]
    Status { host: String, status: StatusCode },
    #[error("blob {digest} has {found} bytes in the registry, but {wanted} in the manifest")]
    Length {
        digest: Digest,
        wanted: u64,
        found: u64,
    },
    #[error("digest of the manifest is {found} instead of {wanted}")]
    Digest { wanted: Digest, found: Digest },
    #[error("{what} has {found} bytes: the limit is {limit}")]
    TooLarge {
        what: &'static str,
        found: u64,
        limit: u64,
    },
    #[error("index refers to another index")]
    NestedIndex,
    #[error("pull did not finish within {0} s")]
    Deadline(u64),
    #[error("registry has no endpoint: its list of endpoints is empty")]
    NoEndpoint,
    #[error("a part of the pull panicked, or the server is stopping")]
    Panic,
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("cannot compute the digest of a blob")]
    Sum(#[source] ConvertError),
}

impl PullError {
    /// Whether an immediate retry may succeed.
    fn is_passing(&self) -> bool {
        match self {
            Self::Http(HttpError::Exchange { .. } | HttpError::Stalled { .. }) => true,
            Self::Status { status, .. } => status.is_server_error(),
            _ => false,
        }
    }
}

impl Client {
    #[must_use]
    pub fn new(registries: Registries, tls: Arc<ClientConfig>) -> Self {
        let connector = Connector::new(&registries, tls);
        Self {
            registries,
            connector,
            program: None,
        }
    }

    /// Hashes large blobs in helper processes instead of threads.
    #[must_use]
    pub fn summing_by(self, program: Program) -> Self {
        Self {
            program: Some(program),
            ..self
        }
    }

    /// Pulls an image. The manifest is always requested, so that access is checked. Blobs that are in the store are not
    /// requested again.
    ///
    /// `credentials` come from the request. Without them, the operator's credentials are used.
    ///
    /// # Errors
    /// Returns the error of the last endpoint that was tried.
    pub async fn pull(
        &self,
        reference: &Reference,
        credentials: Option<&Credentials>,
        store: &Store,
        limits: &Limits,
    ) -> Result<Pulled, PullError> {
        self.pull_followed(reference, credentials, store, limits, &())
            .await
    }

    /// Like [`Client::pull`], with a follower that decides whether the layers are needed. Dropping the future ends the
    /// pull.
    ///
    /// # Errors
    /// Returns the errors of [`Client::pull`].
    pub async fn pull_followed(
        &self,
        reference: &Reference,
        credentials: Option<&Credentials>,
        store: &Store,
        limits: &Limits,
        follow: &dyn Follow,
    ) -> Result<Pulled, PullError> {
        let mut result = Err(PullError::NoEndpoint);
        for target in self.registries.targets(reference, credentials)? {
            let limit = self.registries.timeouts.pull;
            let pull = self.pull_from(&target, reference, store, limits, follow);
            let deadline = || Err(PullError::Deadline(limit.as_secs()));
            result = timeout(limit, pull).await.unwrap_or_else(|_| deadline());
            if result.is_ok() {
                break;
            }
        }
        result
    }

    async fn pull_from(
        &self,
        target: &Target,
        reference: &Reference,
        store: &Store,
        limits: &Limits,
        follow: &dyn Follow,
    ) -> Result<Pulled, PullError> {
        let session = Session {
            connector: &self.connector,
            target,
            repository: &reference.path,
            authorization: Mutex::new(None),
        };
        let pull = Pull {
            session,
            reference,
            store,
            follow,
            program: self.program.as_ref(),
        };
        let (digest, manifest) = pull.manifest().await?;
        manifest.check(limits)?;
        let bytes = manifest.layers.iter().map(|(layer, _)| layer.size).sum();
        let need = follow.found(&digest, manifest.layers.len(), bytes);
        let config = pull.config(&manifest).await?;
        let blobs = match need {
            Need::Layers => pull.layers(&manifest).await?,
            Need::Config => Vec::new(),
        };
        let parts = blobs
            .into_iter()
            .zip(&manifest.layers)
            .zip(&config.diff_ids);
        let layers = parts.map(|((blob, (_, compression)), diff_id)| Layer {
            blob,
            compression: *compression,
            diff_id: *diff_id,
        });
        Ok(Pulled {
            digest,
            layers: layers.collect(),
            config,
        })
    }
}

/// State of a blob before it is pulled.
enum Place {
    Stored(Lease),
    Missing(Draft),
}

struct Pull<'a> {
    session: Session<'a>,
    reference: &'a Reference,
    store: &'a Store,
    follow: &'a dyn Follow,
    program: Option<&'a Program>,
}

/// Cancels a hash computation when the pull that needs it ends.
#[derive(Default)]
struct Stop(Arc<AtomicBool>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Pull<'_> {
    /// The manifest for linux/amd64 and its digest.
    async fn manifest(&self) -> Result<(Digest, Manifest), PullError> {
        let version = self.reference.version();
        let (digest, document) = self.document(&version, self.reference.digest).await?;
        let variant = match document {
            Document::Manifest(manifest) => return Ok((digest, manifest)),
            Document::Index(variant) => variant,
        };
        check_size("manifest", variant.size, MAX_MANIFEST)?;
        let version = variant.digest.to_string();
        match self.document(&version, Some(variant.digest)).await? {
            (digest, Document::Manifest(manifest)) => Ok((digest, manifest)),
            (_, Document::Index(_)) => Err(PullError::NestedIndex),
        }
    }

    async fn document(
        &self,
        version: &str,
        wanted: Option<Digest>,
    ) -> Result<(Digest, Document), PullError> {
        let path = format!("/v2/{}/manifests/{version}", self.reference.path);
        let mut answer = self.session.get(&path, &ACCEPTED.join(", ")).await?;
        self.check_status(&answer.server.host, answer.response.status())?;
        let kind = answer.response.headers().get(CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        let kind = kind.to_owned();
        let body = self
            .session
            .connector
            .body(&mut answer, MAX_MANIFEST)
            .await?;
        let found = Digest::of(&body);
        if let Some(wanted) = wanted.filter(|wanted| *wanted != found) {
            return Err(PullError::Digest { wanted, found });
        }
        Ok((found, Document::parse(&body, &kind)?))
    }

    async fn config(&self, manifest: &Manifest) -> Result<Config, PullError> {
        check_size("config", manifest.config.size, MAX_CONFIG)?;
        let blob = self
            .blob(&manifest.config, self.find(&manifest.config)?)
            .await?;
        let path = blob.path();
        let read = std::fs::read(&path).map_err(|source| StoreError::File {
            action: "read",
            path,
            source,
        })?;
        Ok(Config::parse(&read, manifest.layers.len())?)
    }

    /// Pulls all layers, some of them concurrently. Space for all of them is reserved before the first is requested.
    async fn layers(&self, manifest: &Manifest) -> Result<Vec<Lease>, PullError> {
        let permits = Semaphore::new(PARALLEL);
        let mut places = Vec::new();
        for (layer, _) in &manifest.layers {
            places.push((layer, self.find(layer)?));
        }
        let pulls = places.into_iter().map(|(layer, place)| async {
            // The semaphore is never closed.
            let _permit = permits.acquire().await.map_err(|_| PullError::Panic)?;
            let origin = match &place {
                Place::Stored(_) => Origin::Store,
                Place::Missing(_) => Origin::Registry,
            };
            let blob = self.blob(layer, place).await?;
            self.follow.layer(&layer.digest, layer.size, origin);
            Ok(blob)
        });
        join_all(pulls).await
    }

    /// The blob in the store, or a draft for it.
    fn find(&self, wanted: &Descriptor) -> Result<Place, PullError> {
        match self.store.take(Object::Blob(wanted.digest)) {
            Some(lease) => Ok(Place::Stored(lease)),
            None => Ok(Place::Missing(self.store.draft(wanted.size)?)),
        }
    }

    async fn blob(&self, wanted: &Descriptor, place: Place) -> Result<Lease, PullError> {
        let mut draft = match place {
            Place::Stored(lease) => return Ok(lease),
            Place::Missing(draft) => draft,
        };
        let mut attempt = 1;
        loop {
            match self.try_blob(wanted, &mut draft).await {
                Err(error) if error.is_passing() && attempt < ATTEMPTS => attempt += 1,
                Err(error) => return Err(error),
                Ok(()) => break,
            }
        }
        // Hashing and syncing a large file blocks the thread.
        let (digest, size) = (wanted.digest, wanted.size);
        let program = self.program.filter(|_| size >= LARGE).cloned();
        let stop = Stop::default();
        let is_stopped = Arc::clone(&stop.0);
        let finish = tokio::task::spawn_blocking(move || match program {
            Some(program) => draft.finish_blob_by(digest, size, |file| {
                let sum = program.sum(file, &|| is_stopped.load(Ordering::Relaxed));
                sum.map_err(PullError::Sum)
            }),
            None => Ok(draft.finish_blob(digest, size)?),
        });
        finish.await.map_err(|_| PullError::Panic)?
    }

    async fn try_blob(&self, wanted: &Descriptor, draft: &mut Draft) -> Result<(), PullError> {
        let digest = wanted.digest;
        draft.restart()?;
        let path = format!("/v2/{}/blobs/{digest}", self.reference.path);
        let mut answer = self.session.get(&path, "*/*").await?;
        self.check_status(&answer.server.host, answer.response.status())?;
        let length = |found| PullError::Length {
            digest,
            wanted: wanted.size,
            found,
        };
        let announced = answer.response.headers().get(CONTENT_LENGTH);
        let announced = announced.and_then(|value| value.to_str().ok()?.parse().ok());
        if let Some(found) = announced.filter(|found| *found != wanted.size) {
            return Err(length(found));
        }
        while let Some(piece) = self.session.connector.piece(&mut answer).await? {
            let found = draft.written() + piece.len() as u64;
            if found > wanted.size {
                return Err(length(found));
            }
            draft.append(&piece)?;
        }
        if draft.written() != wanted.size {
            return Err(length(draft.written()));
        }
        Ok(())
    }

    fn check_status(&self, host: &str, status: StatusCode) -> Result<(), PullError> {
        let host = host.to_owned();
        match status {
            StatusCode::OK => Ok(()),
            StatusCode::NOT_FOUND => Err(PullError::NotFound(self.reference.to_string())),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(PullError::Unauthorized { host })
            }
            StatusCode::TOO_MANY_REQUESTS => Err(PullError::RateLimited { host }),
            status => Err(PullError::Status { host, status }),
        }
    }
}

fn check_size(what: &'static str, found: u64, limit: u64) -> Result<(), PullError> {
    if found > limit {
        return Err(PullError::TooLarge { what, found, limit });
    }
    Ok(())
}
