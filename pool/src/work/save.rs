//! Writing a sandbox to disk: pauses, snapshots for templates and forks; and the removal of a slot.

use std::{
    fs, io,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use api_types::envd::ExecRequest;
use model::template_file;
use vmm_control::{ControlClient, files::Lineage};

use super::{WorkError, connect_agent};
use crate::{
    cgroup::Groups,
    host,
    record::{Durability, Kept, Record, SlotDir, private_dir},
    spec::PauseMode,
};

/// Timeout of a save: writing much memory to a slow disk takes minutes.
const SAVE: Duration = Duration::from_secs(300);

/// A client on the open control connection, or on a new one.
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

/// How a pause ended.
#[derive(Debug)]
pub(crate) enum PauseOutcome {
    /// Everything is on disk; this is the record that was written.
    OnDisk(Box<Record>),
    /// The pause failed, and the VM goes on.
    Kept(WorkError),
    /// The pause failed, and the VM cannot go on.
    Lost(WorkError),
}

impl PausePlan {
    /// Writes the sandbox to disk. On success the VM stays paused, for the driver to kill.
    pub(crate) fn run(mut self) -> PauseOutcome {
        let lineage = self.record.lineage.clone();
        let mut control = match control(self.control.take(), &self.dir, lineage) {
            Ok(control) => control,
            Err(e) => return PauseOutcome::Lost(e),
        };
        match self.save(&mut control) {
            Ok(()) => PauseOutcome::OnDisk(Box::new(self.record)),
            Err(e) => {
                // An incomplete snapshot.
                let _ = fs::remove_dir_all(self.dir.pause());
                match control.resume() {
                    Ok(()) => PauseOutcome::Kept(e),
                    Err(_) => PauseOutcome::Lost(e),
                }
            }
        }
    }

    fn save(&mut self, control: &mut ControlClient) -> Result<(), WorkError> {
        let pause = self.dir.pause();
        match self.mode {
            PauseMode::Memory => control
                .snapshot_diff(&pause)
                .map_err(|e| WorkError::Control("write the VM to disk", e))?,
            PauseMode::FilesystemOnly => {
                self.sync()?;
                private_dir(&pause).map_err(|e| WorkError::Io("make a directory", e))?;
                control
                    .save_layer(&pause.join(template_file::LAYER))
                    .map_err(|e| WorkError::Control("write the disk", e))?;
            }
        }
        self.record.kept = Kept::Paused(self.mode);
        self.record.lifetime.end_at = host::unix_ms();
        sync_dir(&pause)
            .and_then(|()| self.dir.write(&self.record, Durability::Host))
            .map_err(|e| WorkError::Io("write the sandbox's record", e))
    }

    /// Has the guest write its caches to its disk, since only the disk is kept.
    fn sync(&self) -> Result<(), WorkError> {
        let mut client = connect_agent(&self.dir.vsock(), self.timeout)?;
        client.set_access_token(self.record.init.access_token.clone());
        let mut request = ExecRequest::new("/bin/sync", &[]);
        request.user = Some("root".to_owned());
        client
            .exec(&request, self.timeout)
            .map_err(|e| WorkError::Agent("run sync in the guest", e))
            .map(|_| ())
    }
}

/// Writes every file of a directory through to the disk.
fn sync_dir(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_file() {
            fs::File::open(path)?.sync_all()?;
        }
    }
    fs::File::open(dir)?.sync_all()
}

/// Writes a template through to the disk. A failure is only logged, because the template is usable.
pub(crate) fn sync_tree(home: &Path) {
    let image = home.join("image");
    let synced = if image.is_dir() {
        sync_dir(&image)
    } else {
        Ok(())
    };
    if let Err(error) = synced.and_then(|()| sync_dir(home)) {
        tracing::warn!(dir = %home.display(), %error, "cannot sync a template: it may be lost if the host crashes");
    }
}

/// A snapshot of a sandbox, which stays as it is, for a template or for forks.
#[derive(Debug)]
pub(crate) struct SnapshotPlan {
    pub(crate) dir: SlotDir,
    pub(crate) from: SnapshotFrom,
    /// The directory that is made.
    pub(crate) to: PathBuf,
}

#[derive(Debug)]
pub(crate) enum SnapshotFrom {
    /// A running VM: its control connection, if one is open, and the lineage of its record.
    Vm(Option<UnixStream>, Option<Lineage>),
    /// The files of a pause.
    Pause,
}

/// How a snapshot failed.
#[derive(Debug)]
pub(crate) enum SnapshotFailed {
    /// The sandbox is as before.
    Unchanged(WorkError),
    /// The VM cannot go on.
    Lost(WorkError),
}

impl SnapshotPlan {
    /// Writes the snapshot and lets the VM go on.
    ///
    /// # Errors
    /// Returns whether the sandbox survived; nothing is left at the target then.
    pub(crate) fn run(self) -> Result<(), SnapshotFailed> {
        match self.from {
            SnapshotFrom::Vm(open, lineage) => of_vm(open, lineage, &self.dir, &self.to),
            SnapshotFrom::Pause => {
                link_snapshot(&self.dir.pause(), &self.to).map_err(SnapshotFailed::Unchanged)
            }
        }
    }
}

fn of_vm(
    open: Option<UnixStream>,
    lineage: Option<Lineage>,
    dir: &SlotDir,
    to: &Path,
) -> Result<(), SnapshotFailed> {
    let mut control = control(open, dir, lineage).map_err(SnapshotFailed::Lost)?;
    let written = control.snapshot_diff(to);
    let resumed = control.resume();
    if written.is_err() || resumed.is_err() {
        let _ = fs::remove_dir_all(to);
    }
    let failed = |e| WorkError::Control("write a snapshot of the VM", e);
    match (written, resumed) {
        (Ok(()), Ok(())) => Ok(()),
        (Err(e), Ok(())) => Err(SnapshotFailed::Unchanged(failed(e))),
        (Err(e), Err(_)) | (Ok(()), Err(e)) => Err(SnapshotFailed::Lost(failed(e))),
    }
}

/// The snapshot that the forks of one request start from. The directory is removed with the last reference; VMs that
/// were restored from it keep its files open.
#[derive(Debug)]
pub(crate) struct ForkSnapshot(PathBuf);

impl ForkSnapshot {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self(dir)
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.0
    }
}

impl Drop for ForkSnapshot {
    fn drop(&mut self) {
        let dir = std::mem::take(&mut self.0);
        let remove = move || match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(dir = %dir.display(), %error, "cannot remove the snapshot of forks");
            }
            _ => {}
        };
        // Deleting large files takes time, and the last reference may be the driver's.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(remove)),
            Err(_) => remove(),
        }
    }
}

/// Links the files of a snapshot into another directory. They never change, so a link is as good as a copy.
fn link_snapshot(from: &Path, to: &Path) -> Result<(), WorkError> {
    let link = || -> io::Result<()> {
        fs::create_dir(to)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            fs::hard_link(entry.path(), to.join(entry.file_name()))?;
        }
        Ok(())
    };
    link().map_err(|e| {
        let _ = fs::remove_dir_all(to);
        WorkError::Io("link the snapshot", e)
    })
}

/// Removes the directory and the control group of a slot whose VM has exited.
///
/// # Errors
/// One of them cannot be removed; the next server tries again.
pub(crate) fn clean(dir: &SlotDir, groups: &Groups, id: &str) -> io::Result<()> {
    let files = dir.remove();
    groups.remove(id).and(files)
}
