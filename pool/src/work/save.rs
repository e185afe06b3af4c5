//! Writes a sandbox to disk for a pause, a template or forks, and removes a slot from disk.

mod vm;

pub(crate) use vm::{Content, Guest};

use std::{
    fs, io,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use library::durable::{Durability, private_dir, sync_dir, sync_files};
use model::template_file;
use vmm_control::{ControlClient, files::Lineage};

use super::{WorkError, connect_agent};
use crate::{
    cgroup::Groups,
    claim::Hold,
    host,
    record::{Kept, RECORD, Record, SlotDir},
    state::PauseMode,
};
use vm::{Frozen, pause_with_consistent_disk};

/// Timeout of each request of a save: writing a lot of memory to a slow disk takes minutes.
const SAVE: Duration = Duration::from_secs(300);

/// Returns a client on the open control connection if there is one, otherwise on a new connection.
fn control(
    open: Option<UnixStream>,
    dir: &SlotDir,
    lineage: Option<Lineage>,
) -> Result<ControlClient, WorkError> {
    let failed = |e| WorkError::Io("connect to the VMM", e);
    let control = match open {
        Some(stream) => {
            stream.set_nonblocking(false).map_err(failed)?;
            ControlClient::new(stream, Some(SAVE))
        }
        None => ControlClient::connect(&dir.control(), Some(SAVE)),
    };
    Ok(control.map_err(failed)?.with_lineage(lineage))
}

#[derive(Debug)]
pub(crate) struct PausePlan {
    pub(crate) dir: SlotDir,
    pub(crate) record: Record,
    pub(crate) mode: PauseMode,
    pub(crate) control: Option<UnixStream>,
    pub(crate) timeout: Duration,
}

/// Outcome of a pause.
#[derive(Debug)]
pub(crate) enum PauseOutcome {
    /// The snapshot and this record are on disk.
    OnDisk(Box<Record>),
    /// The pause failed, and the VM continues.
    Kept(WorkError),
    /// The pause failed, and the VM cannot continue.
    Lost(WorkError),
}

impl PausePlan {
    /// Writes the sandbox to disk. On success the VM stays paused, and the driver must kill it.
    pub(crate) fn run(mut self) -> PauseOutcome {
        let running = self.record.clone();
        let lineage = self.record.lineage.clone();
        let mut control = match control(self.control.take(), &self.dir, lineage) {
            Ok(control) => control,
            Err(e) => return PauseOutcome::Lost(e),
        };
        let mut frozen = None;
        match self.save(&mut control, &mut frozen) {
            Ok(()) => PauseOutcome::OnDisk(Box::new(self.record)),
            Err(e) => {
                if let Err(error) = self.dir.undo_pause(&running) {
                    tracing::error!(
                        dir = %self.dir.path().display(),
                        %error,
                        "cannot remove the files of a failed pause"
                    );
                }
                match control.resume() {
                    Ok(()) => {
                        if let Some(guest) = frozen {
                            guest.thaw();
                        }
                        PauseOutcome::Kept(e)
                    }
                    Err(_) => PauseOutcome::Lost(e),
                }
            }
        }
    }

    fn save(
        &mut self,
        control: &mut ControlClient,
        frozen: &mut Option<Frozen>,
    ) -> Result<(), WorkError> {
        let pause = self.dir.pause();
        // Such files exist only if an earlier attempt to remove them failed.
        self.dir
            .forget_pause()
            .map_err(|e| WorkError::Io("remove the files of an earlier pause", e))?;
        match self.mode {
            PauseMode::Memory => control
                .snapshot_diff(&pause)
                .map_err(|e| WorkError::Control("write the VM to disk", e))?,
            PauseMode::FilesystemOnly => {
                let token = self.record.init.access_token.clone();
                let guest = pause_with_consistent_disk(control, &self.dir, token, self.timeout)?;
                *frozen = Some(guest);
                private_dir(&pause).map_err(|e| WorkError::Io("make a directory", e))?;
                control
                    .save_layer(&pause.join(template_file::LAYER))
                    .map_err(|e| WorkError::Control("write the disk", e))?;
            }
        }
        self.record.kept = Kept::Paused(self.mode);
        if let Some(claim) = &mut self.record.claim {
            claim.hold = Hold::Sealed;
        }
        self.record.lifetime.end_at = host::unix_ms();
        self.dir
            .write_pause(&self.record)
            .map_err(|e| WorkError::Io("write the sandbox's record", e))
    }
}

/// A snapshot of a sandbox for a template or for forks. The sandbox is not changed.
#[derive(Debug)]
pub(crate) struct SnapshotPlan {
    pub(crate) dir: SlotDir,
    pub(crate) from: SnapshotFrom,
    /// The directory to create for the snapshot.
    pub(crate) to: PathBuf,
    /// Whether the snapshot must survive a crash of the host.
    pub(crate) durability: Durability,
}

#[derive(Debug)]
pub(crate) enum SnapshotFrom {
    /// A running VM, with its control connection, if one is open, and the lineage from its record.
    Vm(Option<UnixStream>, Option<Lineage>, Content),
    /// The files of a pause.
    Pause,
}

/// A failed snapshot, and its effect on the sandbox.
#[derive(Debug)]
pub(crate) enum SnapshotFailed {
    /// The sandbox continues unchanged.
    Unchanged(WorkError),
    /// The VM cannot continue.
    Lost(WorkError),
}

impl SnapshotPlan {
    /// Writes the snapshot, and resumes the VM if there is one.
    ///
    /// # Errors
    /// Returns [`SnapshotFailed`], which states whether the sandbox survived. No files are left in the target
    /// directory.
    pub(crate) fn run(self) -> Result<(), SnapshotFailed> {
        match self.from {
            SnapshotFrom::Vm(open, lineage, content) => {
                vm::save(open, lineage, &content, &self.dir, &self.to)?;
            }
            SnapshotFrom::Pause => {
                link_snapshot(&self.dir.pause(), &self.to).map_err(SnapshotFailed::Unchanged)?;
            }
        }
        match self.durability {
            Durability::Process => Ok(()),
            // The VM already runs again.
            Durability::Host => sync_snapshot(&self.to).map_err(|e| {
                let _ = fs::remove_dir_all(&self.to);
                SnapshotFailed::Unchanged(WorkError::Io("sync the snapshot", e))
            }),
        }
    }
}

/// Writes the list of pages that a running VM has written since it was restored to `to`, a file of a template.
pub(crate) fn record_working_set(
    open: Option<UnixStream>,
    dir: &SlotDir,
    to: &Path,
) -> Result<(), WorkError> {
    control(open, dir, None)?
        .record_working_set(to)
        .map_err(|e| WorkError::Control("record the working set", e))?;
    let synced = fs::File::open(to).and_then(|file| file.sync_all());
    synced
        .and_then(|()| sync_dir(to.parent().unwrap_or(to)))
        .map_err(|e| WorkError::Io("sync the working set", e))
}

/// Syncs the files of a snapshot, and its directory entry.
fn sync_snapshot(dir: &Path) -> io::Result<()> {
    sync_files(dir)?;
    sync_dir(dir.parent().unwrap_or(dir))
}

/// The snapshot from which the forks of one request start. Its directory is removed when this value is dropped; VMs
/// that were restored from the snapshot keep its files open.
#[derive(Debug)]
pub(crate) struct ForkSnapshot {
    dir: PathBuf,
    /// The source's record when the fork began. The forks inherit template, boot files and VMM.
    pub(crate) source: Record,
}

impl ForkSnapshot {
    pub(crate) fn new(dir: PathBuf, source: Record) -> Self {
        Self { dir, source }
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for ForkSnapshot {
    fn drop(&mut self) {
        let dir = std::mem::take(&mut self.dir);
        let remove = move || match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(dir = %dir.display(), %error, "cannot remove the snapshot of forks");
            }
            _ => {}
        };
        // The driver's task may drop the last reference, and deleting large files takes time. Within a Tokio runtime,
        // the files are therefore deleted on a thread.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(remove)),
            Err(_) => remove(),
        }
    }
}

/// Links the files of a pause, without its record, into a new directory. Links suffice instead of copies, because the
/// files never change.
fn link_snapshot(from: &Path, to: &Path) -> Result<(), WorkError> {
    let link = || -> io::Result<()> {
        fs::create_dir(to)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            if entry.file_name() == RECORD {
                continue;
            }
            fs::hard_link(entry.path(), to.join(entry.file_name()))?;
        }
        Ok(())
    };
    link().map_err(|e| {
        let _ = fs::remove_dir_all(to);
        WorkError::Io("link the snapshot", e)
    })
}

/// Removes the directory and the cgroup of a slot whose VM has exited. With [`Durability::Host`], a crash of the host
/// does not bring the sandbox back.
pub(crate) fn clean(dir: &SlotDir, groups: &Groups, id: &str, durability: Durability) -> Cleaned {
    let disowned = dir.disown().and_then(|()| match durability {
        Durability::Host => dir.sync_removal(),
        Durability::Process => Ok(()),
    });
    let removed = match &disowned {
        Ok(()) => dir.remove(),
        Err(_) => Ok(()),
    };
    Cleaned {
        disowned,
        removed: groups.remove(id).and(removed),
    }
}

/// The outcome of [`clean`].
#[derive(Debug)]
pub(crate) struct Cleaned {
    /// Whether the next server will consider the sandbox ended. With an error, it may find the sandbox again.
    pub(crate) disowned: io::Result<()>,
    /// Whether the files and the cgroup are gone.
    pub(crate) removed: io::Result<()>,
}
