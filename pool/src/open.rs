//! Opens a pool: finds what the previous server left, and starts the driver.

use std::{
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use library::{
    Library,
    durable::{private_dir, sync_dir},
    images::Images,
    store::Store,
    vmms::Vmms,
};
use tokio::sync::mpsc;

use crate::{
    cgroup::Groups,
    change::{Ended, Recovered},
    config::PoolConfig,
    driver::{Driver, Setup},
    error::PoolError,
    handle::Pool,
    host,
    recover::{self, Found, unnamed},
    state_dir::{FORKS, IMAGES, SANDBOXES, SCRATCH, StateLock, TEMPLATES, VMMS, failed},
    version::{self, Raise},
};

/// Capacity of the driver's request channel. When the channel is full, callers wait.
const REQUESTS: usize = 1024;

/// The parts of a pool that are opened on a blocking thread.
struct Opened {
    host_boot_id: String,
    groups: Groups,
    library: Library,
    found: Found,
    background: Option<PathBuf>,
}

impl Opened {
    fn new(config: &PoolConfig, lock: &StateLock) -> io::Result<Self> {
        if !config.vmm.is_file() {
            return Err(io::Error::other(format!(
                "no VMM at {}",
                config.vmm.display()
            )));
        }
        let state = &config.state;
        for dir in [SANDBOXES, TEMPLATES, FORKS, IMAGES, VMMS] {
            private_dir(&state.join(dir))?;
        }
        let raise = version::check(state)?;
        if let Some(parent) = state.canonicalize()?.parent() {
            sync_dir(parent)?;
        }
        let host_boot_id = host::boot_id()?;
        let total = host::meminfo("MemTotal");
        let memory = total.map(|bytes| bytes.saturating_sub(config.memory_reserve.0));
        // Identifies the directory, whatever path leads to it.
        let meta = lock.0.metadata()?;
        let tag = format!("{:x}-{:x}", meta.dev(), meta.ino());
        let scratch = Path::new(SCRATCH);
        let groups = Groups::open(
            &tag,
            config.limits.clone(),
            config.missing_limits,
            memory,
            scratch,
        )?;
        let installed = config.installed_templates.as_deref();
        let templates = state.join(TEMPLATES);
        let images = config.images.iter().map(PathBuf::as_path);
        let vmms = Vmms::open(state.join(VMMS), &config.vmm)?;
        let kept = Images::open(&state.join(IMAGES))?;
        let dirs = images.chain(installed).chain([templates.as_path()]);
        let store = Store::new(kept, dirs)?;
        // Files below a directory are lost, even if synced, when the directory's own entry is not on disk. An older
        // server cannot read the new formats; raising the version syncs the directory as well.
        match raise {
            Raise::Needed => version::raise(state)?,
            Raise::NotNeeded => sync_dir(state)?,
        }
        let mut library = Library::open(templates, installed, store, vmms)?;
        let mut found = recover::recover(
            &state.join(SANDBOXES),
            &state.join(FORKS),
            &host_boot_id,
            &groups,
            config.lifetime_of_note,
        )?;
        unnamed::name(&mut found.entries, library.vmms_mut());
        if let Some(memory) = config.server_memory {
            groups.enter_as_server(memory.0)?;
        }
        let background = groups.open_background(config.server_memory.map(|memory| memory.0))?;
        Ok(Self {
            host_boot_id,
            groups,
            library,
            found,
            background,
        })
    }
}

impl Pool {
    /// Takes the lock of the state directory, and opens the pool as [`Pool::open_locked`] does.
    ///
    /// # Errors
    /// Returns the errors of [`StateLock::take`] and of [`Pool::open_locked`].
    pub async fn open(
        config: PoolConfig,
    ) -> Result<(Self, Recovered, mpsc::UnboundedReceiver<Ended>), PoolError> {
        let state = config.state.clone();
        let lock = tokio::task::spawn_blocking(move || StateLock::take(&state)).await;
        let lock = lock.map_err(|e| failed(&config.state, &e))??;
        Self::open_locked(config, lock).await
    }

    /// Opens the pool. Sandboxes of the previous server are found immediately. A running one is verified before its
    /// first request is served, and ends if it cannot be adopted. Other leftovers of the previous server are removed in
    /// the background, and warm slots are filled afterwards. Deadlines that expired while no server ran take effect
    /// immediately. The receiver reports each sandbox that ends.
    ///
    /// # Errors
    /// Returns [`PoolError::Failed`] if the state directory cannot be read or written, if there is no `cube-vmm`, if a
    /// directory of templates or images does not exist, or if the host cannot enforce a limit that
    /// [`PoolConfig::missing_limits`] requires.
    pub async fn open_locked(
        config: PoolConfig,
        lock: StateLock,
    ) -> Result<(Self, Recovered, mpsc::UnboundedReceiver<Ended>), PoolError> {
        let state = config.state.clone();
        let (config, lock, opened) = tokio::task::spawn_blocking(move || {
            let opened = Opened::new(&config, &lock);
            (config, lock, opened)
        })
        .await
        .map_err(|e| failed(&state, &e))?;
        let opened = opened.map_err(|e| failed(&state, &e))?;
        let (requests, inbox) = mpsc::channel(REQUESTS);
        let (ended, ends) = mpsc::unbounded_channel();
        let driver = Driver::new(Setup {
            keeps_unused: opened.found.is_partial || opened.library.is_partial(),
            config,
            host_boot_id: opened.host_boot_id,
            groups: Arc::new(opened.groups),
            library: opened.library,
            entries: opened.found.entries,
            leftovers: opened.found.leftovers,
            clock: opened.found.clock,
            requests: inbox,
            ended,
            lock,
        });
        tokio::spawn(driver.run());
        let background = opened.background.map(Arc::from);
        let pool = Self {
            requests,
            background,
        };
        Ok((pool, opened.found.recovered, ends))
    }
}
