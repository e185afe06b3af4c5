//! The store of images, and the converter that makes root images.

use std::{
    path::Path,
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use model::Bytes;
use oci_image::{
    ConvertError, Converter, Limits, Program, Pulled, Resources, Store,
    store::{Lease, StoreError},
};
use tasks::on_thread;

use super::ImagesSpec;
use crate::cancel::Cancel;

pub(super) static LIMITS: LazyLock<Limits> = LazyLock::new(Limits::default);
/// How long to wait for blocking work of a predecessor that holds the store.
const LAST_HOLDER: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(10);

pub(super) struct Parts {
    pub(super) store: Store,
    pub(super) converter: Arc<Converter>,
}

impl Parts {
    /// # Errors
    /// Returns a message that names the missing part.
    pub(super) fn new(
        spec: &ImagesSpec,
        store: Store,
        background: Option<&Path>,
    ) -> Result<Self, String> {
        if !spec.converter.is_file() {
            return Err(format!(
                "this server cannot build from images: there is no cube-image at {}; the operator installs it with \
                 `cargo xtask prepare`, or sets its path, images.converter",
                spec.converter.display()
            ));
        }
        let converter = Converter::new(&spec.converter, LIMITS.clone(), resources(spec));
        let converter = converter.in_group(background.map(Path::to_owned));
        let converter = converter.with_userland(&spec.userland).map_err(|error| {
            format!(
                "this server cannot build from images: cannot read the programs bash and busybox in {}: {error}; the \
                 operator makes them with `cargo xtask prepare`, or sets their directory, images.userland",
                spec.userland.display()
            )
        })?;
        Ok(Self {
            store,
            converter: Arc::new(converter),
        })
    }

    /// Converts a pulled image to a root image.
    ///
    /// # Errors
    /// Returns the errors of [`Converter::convert_unless`].
    pub(super) async fn convert(
        &self,
        pulled: Pulled,
        cancel: Cancel,
    ) -> Result<Lease, ConvertError> {
        let (store, converter) = (self.store.clone(), Arc::clone(&self.converter));
        let work = move || converter.convert_unless(&pulled, &store, &|| cancel.is_cancelled());
        // An error means that the server is stopping.
        on_thread(work)
            .await
            .unwrap_or(Err(ConvertError::Cancelled))
    }
}

/// `cube-image` as hash helper, in the control group for background work.
pub(super) fn program(spec: &ImagesSpec, background: Option<&Path>) -> Program {
    Program::new(&spec.converter, resources(spec)).in_group(background.map(Path::to_owned))
}

fn resources(spec: &ImagesSpec) -> Resources {
    Resources {
        memory: spec.memory.0,
        ..Resources::default()
    }
}

/// Opens the store in `dir` and removes leftovers of a killed server.
///
/// # Errors
/// Returns a message for people.
pub(super) fn open_store(dir: &Path, quota: Bytes, disk_reserve: Bytes) -> Result<Store, String> {
    let deadline = Instant::now() + LAST_HOLDER;
    loop {
        match Store::open_with_reserve(dir, quota.0, disk_reserve.0) {
            Ok(store) => return Ok(store),
            Err(StoreError::InUse(_)) if Instant::now() < deadline => std::thread::sleep(POLL),
            Err(why) => {
                let why = model::chain(&why);
                return Err(format!("this server cannot build from images: {why}"));
            }
        }
    }
}
