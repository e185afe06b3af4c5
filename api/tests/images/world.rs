//! A pool with images, and builds that request them.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant, UNIX_EPOCH},
};

use builds::{
    bases::{Base, Bases, ImagesSpec},
    cancel::{Canceller, cancellation},
    log::BuildLog,
};
use envd::{ENVD_PORT, EnvdClient, ExecRequest};
use model::Bytes;
use oci_image::registry::{Credentials, Registries};
use pool::{CreateSpec, Init, Lifetime, MissingLimits, OnClose, Pool, PoolConfig, Sandbox};
use tempfile::TempDir;

use crate::{archive::Image, server::Server};

pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn lack() -> Option<String> {
    let registry = Path::new("/usr/bin/docker-registry");
    let lack = test_cases::lack_for_vms(&[
        ("CUBE_ARTIFACTS", "templates/base"),
        ("CUBE_ARTIFACTS", "guest/busybox"),
        ("CUBE_BIN", "cube-vmm"),
        ("CUBE_BIN", "cube-image"),
    ]);
    lack.or_else(|| {
        (!registry.exists())
            .then(|| format!("{} is missing (run `cargo xtask test`)", registry.display()))
    })
}

pub(crate) fn variable(name: &str) -> PathBuf {
    std::env::var_os(name).unwrap_or_default().into()
}

pub(crate) fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    runtime.unwrap().block_on(test)
}

/// A state directory. The path is short because unix socket addresses are limited to 108 bytes.
pub(crate) fn state() -> TempDir {
    tempfile::Builder::new()
        .prefix("cube-im-")
        .tempdir_in("/var/tmp")
        .unwrap()
}

/// Registries on this host: each is its own mirror over http.
pub(crate) fn registries(addresses: &[std::net::SocketAddr]) -> Registries {
    let mut registries = Registries::default();
    for address in addresses {
        let endpoint = format!("http://{address}").parse().unwrap();
        let list = registries.endpoints.entry(address.to_string());
        list.or_default().push(endpoint);
    }
    registries
}

pub(crate) fn images(registries: Registries) -> ImagesSpec {
    ImagesSpec {
        converter: variable("CUBE_BIN").join("cube-image"),
        userland: variable("CUBE_ARTIFACTS").join("guest"),
        quota: Bytes::mib(4096),
        memory: Bytes::mib(1024),
        registries,
    }
}

/// An open pool with images.
pub(crate) struct World {
    pub(crate) pool: Pool,
    pub(crate) bases: Bases,
    store: PathBuf,
}

impl World {
    pub(crate) async fn open(state: &Path, spec: ImagesSpec) -> Self {
        Self::of_pool(config(state), spec).await
    }

    pub(crate) async fn of_pool(config: PoolConfig, spec: ImagesSpec) -> Self {
        let store = config.state.join("builds/images");
        let (pool, _, _) = Pool::open(config).await.unwrap();
        let reserve = Bytes::mib(64);
        let bases = Bases::open(pool.clone(), store.clone(), reserve, spec).await;
        Self { pool, bases, store }
    }

    pub(crate) async fn close(self) {
        self.pool.close(OnClose::Kill).await;
    }

    /// Requests an image, as a build that has ended when this returns.
    pub(crate) async fn ask(&self, reference: &str) -> Asked {
        self.ask_with(reference, None).await
    }

    pub(crate) async fn ask_with(&self, reference: &str, password: Option<&str>) -> Asked {
        let log = BuildLog::default();
        let (canceller, cancel) = cancellation();
        let credentials = password.map(|password| Credentials {
            username: "user".to_owned(),
            password: password.to_owned(),
        });
        let base = self.bases.of_image(reference, credentials, &log, &cancel);
        let base = base.await;
        Asked {
            base,
            log: messages(&log),
            _canceller: canceller,
        }
    }

    /// Runs a script as root in a guest of a template.
    pub(crate) async fn sh(&self, template: &str, script: &str) -> String {
        let sandbox = self.create(template).await;
        let output = sh(&sandbox, script).await;
        self.pool.kill(&sandbox.id).await.unwrap();
        output
    }

    pub(crate) async fn create(&self, template: &str) -> Sandbox {
        let spec = CreateSpec {
            template: template.to_owned(),
            init: Init::default(),
            note: String::new(),
            lifetime: lifetime(),
            policy: netisolation::Policy::default(),
            priority: pool::Priority::default(),
        };
        self.pool.create(spec).await.unwrap()
    }

    /// Numbers of unfinished files, of blobs and of root images in the store. A directory that the store, which is opened
    /// in the background, has not made yet has none.
    pub(crate) fn stored(&self) -> [usize; 3] {
        ["drafts", "blobs", "images"].map(|name| {
            let files = fs::read_dir(self.store.join(name));
            files.map_or(0, Iterator::count)
        })
    }
}

/// Runs a script as root in a guest.
pub(crate) async fn sh(sandbox: &Sandbox, script: &str) -> String {
    let (vsock, script) = (sandbox.vsock.clone(), script.to_owned());
    let output = tokio::task::spawn_blocking(move || {
        let mut agent = EnvdClient::connect(&vsock, ENVD_PORT, PATIENCE).unwrap();
        let mut request = ExecRequest::new("/bin/bash", &["-c", &script]);
        request.user = Some("root".into());
        agent.exec(&request, PATIENCE).unwrap()
    });
    let output = output.await.unwrap();
    assert_eq!(output.exit_code, 0, "{output:?}");
    let output = String::from_utf8(output.stdout).unwrap();
    output.trim_end().to_owned()
}

/// A result, and the log of the build. The build holds its base as long as this value exists.
pub(crate) struct Asked {
    pub(crate) base: Result<Base, String>,
    pub(crate) log: Vec<String>,
    _canceller: Canceller,
}

impl Asked {
    pub(crate) fn base(&self) -> &Base {
        self.base.as_ref().unwrap()
    }

    pub(crate) fn reason(&self) -> &str {
        self.base.as_ref().unwrap_err()
    }

    pub(crate) fn count(&self, prefix: &str) -> usize {
        let found = self.log.iter().filter(|line| line.starts_with(prefix));
        found.count()
    }
}

pub(crate) fn messages(log: &BuildLog) -> Vec<String> {
    log.read(|all| all.iter().map(|entry| entry.message.clone()).collect())
}

/// Starts a server with this image as `r:latest`.
pub(crate) async fn serve(image: &Image) -> (Server, String) {
    let server = Server::of(image);
    let address = server.start().await;
    (server, address.to_string())
}

/// Waits until a condition holds.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "timed out: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn lifetime() -> Lifetime {
    let now = UNIX_EPOCH.elapsed().unwrap().as_millis();
    let mut lifetime = Lifetime::default();
    lifetime.set(u64::try_from(now).unwrap(), 3600);
    lifetime
}

pub(crate) fn config(state: &Path) -> PoolConfig {
    let installed = state.join("installed");
    fs::create_dir_all(&installed).unwrap();
    let base = installed.join("base");
    if !base.exists() {
        std::os::unix::fs::symlink(variable("CUBE_ARTIFACTS").join("templates/base"), base)
            .unwrap();
    }
    PoolConfig {
        installed_templates: Some(installed),
        images: vec![variable("CUBE_ARTIFACTS")],
        missing_limits: MissingLimits::Allow,
        max_sandboxes: 10,
        max_saved: 10,
        start_timeout: PATIENCE,
        adopt_timeout: PATIENCE,
        ..PoolConfig::new(variable("CUBE_BIN").join("cube-vmm"), state.to_owned())
    }
}
