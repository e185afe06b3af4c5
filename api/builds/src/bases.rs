//! Base images of builds: turns an image reference into a disk template of the pool.
//!
//! ```text
//! reference ─► manifest ─► layers in the store ─► conversion (cube-image, confined) ─► root image in the store ─┐
//!     │            └─ cached: nothing more is pulled                                                            │
//!     └─► installed template of this name, for `e2bdev/base` ───────────────────────────────────────────────────┤
//!                                                                      disk template, listed in the index ◄─────┘
//! ```
//! The manifest is requested for every build, so that a registry can revoke access. A disk template is found by
//! content: by the digests of the manifest, of the converter and its additions, and by the guest that boots it. Its
//! root image stays in the store. When all disk templates together take more than half of the store's quota, the least
//! recently used ones that no build uses are removed from the pool, which leaves the other half to new images.

mod explain;
mod follow;
mod index;
mod parts;

use std::{
    collections::BTreeSet,
    fmt,
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock, PoisonError, atomic::Ordering},
};

use model::{Bytes, clock::unix_ms};
use oci_image::{
    Client, ConvertError, Pulled, Registries, Store,
    config::Defaults,
    reference::Reference,
    registry::{Credentials, tls},
    store::{Lease, StoreError},
};
use pool::{DiskSpec, Pool, PoolError, TemplateInfo, TemplateKind};
use tasks::on_thread;
use tokio::sync::Semaphore;
use tracing::warn;

use super::{cancel::Cancel, key::Key, log::BuildLog};
use explain::explain;
use follow::Follower;
use index::{Disk, Index};
use parts::{LIMITS, Parts};

/// Repositories that map to installed templates, so that the SDKs' default image needs no registry.
const LOCAL: [(&str, &str); 2] = [
    ("docker.io/e2bdev/base", "base"),
    ("docker.io/e2bdev/code-interpreter", "code-interpreter-v1"),
];
/// Default memory size of guests that boot a disk template.
const MEMORY: Bytes = Bytes::mib(1024);
const VCPUS: u8 = 1;
/// Concurrent conversions. Each may take the memory of `Parts`.
const CONVERSIONS: usize = 1;
const CANCELLED: &str = "build was cancelled";

/// Where images come from and where they are stored.
#[derive(Clone, Debug)]
pub struct ImagesSpec {
    /// The program `cube-image`.
    pub converter: PathBuf,
    /// The directory of the static programs for images without a shell.
    pub userland: PathBuf,
    /// Disk space for all layers and root images.
    pub quota: Bytes,
    /// Memory limit of one conversion.
    pub memory: Bytes,
    pub registries: Registries,
}

/// A disk template in the pool made from an image, and the image's defaults. It stays in the pool at least until the
/// build that requested it ends.
#[derive(Clone, Debug)]
pub struct Base {
    /// Id of a disk template in the pool. The caller does not remove it.
    pub template: String,
    /// Equal keys mean equal disks, even if the template's id has changed.
    pub key: String,
    pub defaults: Defaults,
}

/// Makes disk templates from images. Clones share the image store.
#[derive(Clone)]
pub struct Bases(Arc<Inner>);

struct Inner {
    pool: Pool,
    spec: ImagesSpec,
    /// Directory of the store and the index.
    dir: PathBuf,
    /// Disk space that stays free.
    disk_reserve: Bytes,
    /// Created on first use, since certificates are read from disk.
    client: OnceLock<Client>,
    /// `None` until it is opened.
    store: Mutex<Option<Store>>,
    index: Index,
    turns: Semaphore,
    /// Locked while an installed template is converted to a disk, so that each is converted once.
    installing: tokio::sync::Mutex<()>,
}

impl fmt::Debug for Bases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Bases");
        shown.field("dir", &self.0.dir).finish_non_exhaustive()
    }
}

impl Inner {
    fn client(&self) -> &Client {
        let make = || {
            let program = parts::program(&self.spec, self.pool.background());
            Client::new(self.spec.registries.clone(), tls()).summing_by(program)
        };
        self.client.get_or_init(make)
    }
}

/// A build that requests an image.
#[derive(Clone, Copy)]
struct Asker<'a> {
    /// As the client wrote it.
    reference: &'a str,
    log: &'a BuildLog,
    cancel: &'a Cancel,
}

impl Bases {
    /// Reads the index in `dir`. In the background, opens the store next to it, which removes leftovers of a killed
    /// server. If a part is missing, this is logged, and only builds from images fail.
    pub async fn open(pool: Pool, dir: PathBuf, disk_reserve: Bytes, mut spec: ImagesSpec) -> Self {
        for (repository, template) in LOCAL {
            let local = spec.registries.local.entry(repository.to_owned());
            local.or_insert_with(|| template.to_owned());
        }
        let of = dir.clone();
        let index = on_thread(move || Index::open(of)).await;
        let bases = Self(Arc::new(Inner {
            pool,
            spec,
            dir,
            disk_reserve,
            client: OnceLock::new(),
            store: Mutex::default(),
            // An error means that the server is stopping.
            index: index.unwrap_or_default(),
            turns: Semaphore::new(CONVERSIONS),
            installing: tokio::sync::Mutex::default(),
        }));
        // Before any build can add a template.
        let all = bases.0.pool.templates().await.into_iter();
        let has_lost = (bases.0.index).forget_lost(&all.map(|template| template.id).collect());
        let opened = bases.clone();
        tasks::spawn(async move {
            if has_lost {
                opened.write().await;
            }
            let outdated = opened.0.index.retire(&opened.guest().await);
            opened.remove(outdated).await;
            if let Err(why) = opened.parts().await {
                warn!(why, "templates cannot be built from images");
            }
        });
        bases
    }

    /// The disk templates in the pool that were made from images.
    #[must_use]
    pub fn templates(&self) -> BTreeSet<String> {
        self.0.index.templates()
    }

    /// The disk template of an image. Checks access to the image with its registry each time.
    ///
    /// # Errors
    /// Returns a message for the client, even if the build is cancelled. The message may quote a registry at any
    /// length.
    pub async fn of_image(
        &self,
        reference: &str,
        credentials: Option<Credentials>,
        log: &BuildLog,
        cancel: &Cancel,
    ) -> Result<Base, String> {
        let asker = Asker {
            reference,
            log,
            cancel,
        };
        let base = self.find(asker, credentials).await;
        self.trim().await;
        base
    }

    async fn find(
        &self,
        asker: Asker<'_>,
        credentials: Option<Credentials>,
    ) -> Result<Base, String> {
        let reference = asker.reference;
        let parsed: Reference = reference.parse().map_err(|why| {
            let why = model::chain(&why);
            format!("'{reference}' is not the name of an image: {why}")
        })?;
        let Some(name) = self.0.spec.registries.local_image(&parsed) else {
            return self.of_registry(asker, &parsed, credentials).await;
        };
        match self.installed(name).await {
            Some(template) => self.of_installed(asker, &template).await,
            None => (self.of_registry(asker, &parsed, credentials).await).map_err(|why| {
                format!("{why} (on this server the image is the template '{name}', which is not installed)")
            }),
        }
    }

    async fn installed(&self, name: &str) -> Option<TemplateInfo> {
        let found = self.0.pool.template(name).await;
        found.filter(|template| template.kind == TemplateKind::Installed)
    }

    /// Identifies the kernel and agent of the template `base`, or of the first template by id if there is no `base`.
    async fn guest(&self) -> String {
        let all = self.0.pool.templates().await.into_iter();
        let installed = all.filter(|template| template.kind == TemplateKind::Installed);
        let is_other = |template: &TemplateInfo| template.names.iter().all(|name| name != "base");
        let guest = installed.min_by_key(|template| (is_other(template), template.id.clone()));
        guest.map_or_else(String::new, |template| {
            format!("{} {}", template.id, template.created_unix_s)
        })
    }

    async fn of_installed(
        &self,
        asker: Asker<'_>,
        template: &TemplateInfo,
    ) -> Result<Base, String> {
        let guest = self.guest().await;
        let made = template.created_unix_s.to_string();
        let key = Key::of(&["installed", &template.id, &made, &guest]).to_string();
        let _turn = self.0.installing.lock().await;
        let found = self.present(&key, asker).await;
        follow::announce(asker, &key, found.is_some());
        if let Some(base) = found {
            return Ok(base);
        }
        let disk = self.0.pool.disk_of(&template.id).await;
        let disk = disk.map_err(|why| model::chain(&why))?;
        // Its files are the installed template's.
        let disk = Disk {
            template: &disk.id,
            bytes: 0,
            guest: &guest,
        };
        Ok(self.keep(key, disk, asker).await)
    }

    async fn of_registry(
        &self,
        asker: Asker<'_>,
        reference: &Reference,
        credentials: Option<Credentials>,
    ) -> Result<Base, String> {
        let parts = self.parts().await?;
        let guest = self.guest().await;
        loop {
            let follower = Follower::new(asker, &parts.converter, &guest, &self.0.index);
            let pull = self.0.client().pull_followed(
                reference,
                credentials.as_ref(),
                &parts.store,
                &LIMITS,
                &follower,
            );
            let mut cancelled = asker.cancel.clone();
            let pulled = tokio::select! {
                pulled = pull => pulled,
                () = cancelled.cancelled() => return Err(CANCELLED.to_owned()),
            };
            let mut pulled = pulled.map_err(|why| explain(asker.reference, &why))?;
            let key = follow::key(&parts.converter, &guest, &pulled.digest);
            let defaults = std::mem::take(&mut pulled.config.defaults);
            if let Some(base) = self.present(&key, asker).await {
                return Ok(Base { defaults, ..base });
            }
            // The layers are not held, because the index had a template that the pool no longer has.
            if follower.has_found.load(Ordering::Relaxed) {
                continue;
            }
            let base = self.convert(&parts, pulled, (key, &guest), asker).await?;
            return Ok(Base { defaults, ..base });
        }
    }

    async fn convert(
        &self,
        parts: &Parts,
        pulled: Pulled,
        (key, guest): (String, &str),
        asker: Asker<'_>,
    ) -> Result<Base, String> {
        let mut cancelled = asker.cancel.clone();
        let _turn = tokio::select! {
            turn = self.0.turns.acquire() => turn.map_err(|why| why.to_string())?,
            () = cancelled.cancelled() => return Err(CANCELLED.to_owned()),
        };
        // Another build may have made it in the meantime.
        if let Some(base) = self.present(&key, asker).await {
            return Ok(base);
        }
        follow::note(
            asker,
            &format!("Uncompressing {} layers", pulled.layers.len()),
        );
        let image = match parts.convert(pulled, asker.cancel.clone()).await {
            Ok(image) => image,
            Err(ConvertError::Cancelled) => return Err(CANCELLED.to_owned()),
            Err(why) => return Err(explain_conversion(asker.reference, &why)),
        };
        follow::note(asker, "Layers extracted");
        let disk = self.add(&image).await.map_err(|why| model::chain(&why))?;
        let disk = Disk {
            template: &disk.id,
            bytes: allocated(&image),
            guest,
        };
        Ok(self.keep(key, disk, asker).await)
    }

    /// Adds a root image to the pool, which links it. The store keeps the image as long as anything needs it.
    async fn add(&self, image: &Lease) -> Result<TemplateInfo, PoolError> {
        let spec = DiskSpec {
            root: image.path(),
            layer: None,
            memory: MEMORY,
            vcpus: VCPUS,
        };
        self.0.pool.add_disk(spec).await
    }

    /// The base with this key, if the pool has it. The build holds it from then on.
    async fn present(&self, key: &str, asker: Asker<'_>) -> Option<Base> {
        let template = self.0.index.take(key, asker.cancel, unix_ms())?;
        if self.0.pool.template(&template).await.is_none() {
            self.0.index.forget(key, &template);
            return None;
        }
        Some(Base {
            template,
            key: key.to_owned(),
            defaults: Defaults::default(),
        })
    }

    async fn keep(&self, key: String, disk: Disk<'_>, asker: Asker<'_>) -> Base {
        self.0.index.add(&key, disk, asker.cancel, unix_ms());
        self.write().await;
        Base {
            template: disk.template.to_owned(),
            key,
            defaults: Defaults::default(),
        }
    }

    /// Removes disk templates that no build uses while all of them take more than half of the quota.
    async fn trim(&self) {
        let unneeded = self.0.index.trim(self.0.spec.quota.0 / 2);
        self.remove(unneeded).await;
    }

    async fn remove(&self, unneeded: Vec<String>) {
        if unneeded.is_empty() {
            return;
        }
        for template in unneeded {
            match self.0.pool.remove_template(&template).await {
                Ok(()) | Err(PoolError::NoTemplate(_) | PoolError::Draining) => {}
                Err(why) => {
                    warn!(template, why = %model::chain(&why), "cannot remove the template of an image: retrying at the next build from an image");
                    self.0.index.remove_later(template);
                }
            }
        }
        self.write().await;
    }

    async fn write(&self) {
        let bases = self.clone();
        let written = on_thread(move || bases.0.index.write()).await;
        if let Err(error) = written.map_err(std::io::Error::from).flatten() {
            warn!(%error, "cannot write the index of images: the next server recreates their templates");
        }
    }

    /// Converter and store. The error names the missing part and the remedy.
    async fn parts(&self) -> Result<Parts, String> {
        let inner = Arc::clone(&self.0);
        let opened = on_thread(move || {
            inner.client();
            let mut store = inner.store.lock().unwrap_or_else(PoisonError::into_inner);
            let opened = match store.take() {
                Some(store) => store,
                None => parts::open_store(&inner.dir, inner.spec.quota, inner.disk_reserve)?,
            };
            *store = Some(opened.clone());
            Parts::new(&inner.spec, opened, inner.pool.background())
        });
        opened.await.map_err(|why| why.to_string())?
    }
}

/// Disk space of a file in bytes.
fn allocated(image: &Lease) -> u64 {
    std::fs::metadata(image.path()).map_or(0, |found| found.blocks() * 512)
}

fn explain_conversion(reference: &str, why: &ConvertError) -> String {
    let cure = match why {
        ConvertError::Store(full @ StoreError::Full { .. }) => explain::full(full),
        other => model::chain(other),
    };
    format!("image '{reference}' cannot be converted: {cure}")
}
