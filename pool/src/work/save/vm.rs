//! Saves a running VM, which then continues.

use std::{
    fs, io,
    os::unix::net::UnixStream,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use envd::{ClientError, EnvdClient, ExecRequest};
use library::durable::private_dir;
use model::template_file;
use template::until_quiet;
use vmm_control::{ControlClient, ControlError, files::Lineage};

use super::{SnapshotFailed, WorkError, connect_agent, control};
use crate::record::SlotDir;

/// How long the guest may take to write its caches to the layer: a build step may leave gigabytes.
const SYNC: Duration = Duration::from_secs(120);

/// How long freezing and pausing a guest may take: half of the time after which a frozen guest thaws automatically.
const FROZEN: Duration = Duration::from_secs(10);
/// Time between two requests to freeze.
const AGAIN: Duration = Duration::from_millis(10);
/// Timeout of a thaw. An agent that writes to the frozen disk does not respond.
const THAW: Duration = Duration::from_secs(5);

/// The parts of a VM to save.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// Memory, CPU and disk, as a diff against the template if that still exists.
    Diff,
    /// Memory, CPU and disk, without a base. The guest first syncs its disk, and gets up to ten seconds to become idle,
    /// because each clone repeats unfinished work.
    Whole(Guest),
    /// The layer alone, frozen by the guest.
    Disk(Guest),
}

/// Access to a guest's agent, and its VMM's process.
#[derive(Clone, Debug)]
pub(crate) struct Guest {
    pub(crate) token: Option<String>,
    pub(crate) pid: u32,
}

/// Writes the VM to `to`, and resumes it.
pub(super) fn save(
    open: Option<UnixStream>,
    lineage: Option<Lineage>,
    content: &Content,
    dir: &SlotDir,
    to: &Path,
) -> Result<(), SnapshotFailed> {
    // A failed request to the agent has changed nothing yet.
    if let Content::Whole(guest) = content {
        sync(dir, guest.token.clone(), SYNC).map_err(SnapshotFailed::Unchanged)?;
    }
    let mut control = control(open, dir, lineage).map_err(SnapshotFailed::Lost)?;
    let frozen = match content {
        Content::Disk(guest) => {
            let token = guest.token.clone();
            let frozen = pause_with_consistent_disk(&mut control, dir, token, SYNC);
            Some(frozen.map_err(|e| match control.resume() {
                Ok(()) => SnapshotFailed::Unchanged(e),
                Err(_) => SnapshotFailed::Lost(e),
            })?)
        }
        Content::Diff | Content::Whole(_) => None,
    };
    let written = write(&mut control, content, to);
    let resumed = control.resume();
    if let (Some(frozen), Ok(())) = (frozen, &resumed) {
        frozen.thaw();
    }
    if written.is_err() || resumed.is_err() {
        let _ = fs::remove_dir_all(to);
    }
    match (written, resumed) {
        (Ok(()), Ok(())) => Ok(()),
        (Err(e), Ok(())) => Err(SnapshotFailed::Unchanged(e)),
        (Err(e), Err(_)) => Err(SnapshotFailed::Lost(e)),
        (Ok(()), Err(e)) => Err(SnapshotFailed::Lost(failed(e))),
    }
}

fn write(control: &mut ControlClient, content: &Content, to: &Path) -> Result<(), WorkError> {
    match content {
        Content::Diff => control.snapshot_diff(to).map_err(failed),
        Content::Whole(guest) => {
            let quiet = until_quiet(control, guest.pid).map_err(failed)?;
            if quiet.is_none() {
                tracing::warn!(
                    to = %to.display(),
                    "the guest did not become idle: clones of the template may start slower"
                );
            }
            let begun = Instant::now();
            control.snapshot(to).map_err(failed)?;
            tracing::debug!(?quiet, written = ?begun.elapsed(), to = %to.display(), "snapshot for a template");
            Ok(())
        }
        Content::Disk(_) => {
            private_dir(to).map_err(|e| WorkError::Io("make a directory", e))?;
            control
                .save_layer(&to.join(template_file::LAYER))
                .map_err(failed)
        }
    }
}

fn failed(error: ControlError) -> WorkError {
    WorkError::Control("write a snapshot of the VM", error)
}

/// Writes the caches in the guest's memory to its disk.
fn sync(dir: &SlotDir, token: Option<String>, timeout: Duration) -> Result<EnvdClient, WorkError> {
    let failed = |e| WorkError::Agent("run sync in the guest", e);
    let mut client = connect_agent(&dir.vsock(), timeout)?;
    client.set_access_token(token);
    let mut request = ExecRequest::new("/bin/sync", &[]);
    request.user = Some("root".to_owned());
    let done = client.exec(&request, timeout).map_err(failed)?;
    match done.exit_code {
        0 => Ok(client),
        code => Err(WorkError::Io(
            "run sync in the guest",
            io::Error::other(format!("it failed with status {code}")),
        )),
    }
}

/// Pauses the VM while its disk is consistent without the guest's memory. If the VM continues, the returned guest must
/// thaw the disk.
pub(super) fn pause_with_consistent_disk(
    control: &mut ControlClient,
    dir: &SlotDir,
    token: Option<String>,
    timeout: Duration,
) -> Result<Frozen, WorkError> {
    // Most data is written here, while the guest's programs keep running.
    let mut client = sync(dir, token.clone(), timeout)?;
    let until = Instant::now() + FROZEN;
    let frozen = match freeze(&mut client, until) {
        Ok(true) => Frozen(Some(client)),
        Ok(false) => {
            tracing::warn!(
                dir = %dir.path().display(),
                "the guest's agent is too old to freeze its disk: files that programs are writing may be damaged in the copy"
            );
            Frozen(None)
        }
        Err(error) => {
            // The disk may be frozen even if the response was lost.
            if let Ok(mut client) = connect_agent(&dir.vsock(), THAW) {
                client.set_access_token(token);
                Frozen(Some(client)).thaw();
            }
            return Err(error);
        }
    };
    let error = match control.pause().map_err(failed) {
        Ok(()) if Instant::now() < until => return Ok(frozen),
        Ok(()) => WorkError::Timeout(FROZEN),
        Err(error) => error,
    };
    if control.resume().is_ok() {
        frozen.thaw();
    }
    Err(error)
}

/// Freezes the guest's disk. Returns `false` if the agent cannot.
fn freeze(client: &mut EnvdClient, until: Instant) -> Result<bool, WorkError> {
    loop {
        match client.freeze() {
            Ok(true) => return Ok(true),
            Ok(false) if Instant::now() < until => thread::sleep(AGAIN),
            Ok(false) => return Err(WorkError::Timeout(FROZEN)),
            // An agent of an earlier version.
            Err(ClientError::Refused { status: 404, .. }) => return Ok(false),
            Err(error) => return Err(WorkError::Agent("freeze the guest's disk", error)),
        }
    }
}

/// A guest whose disk is frozen, if its agent supports that.
#[derive(Debug)]
pub(super) struct Frozen(Option<EnvdClient>);

impl Frozen {
    /// The VM must run.
    pub(super) fn thaw(self) {
        let Some(mut client) = self.0 else {
            return;
        };
        client.set_timeout(THAW);
        if let Err(error) = client.thaw() {
            tracing::warn!(%error, "cannot thaw a guest's disk: it thaws automatically");
        }
    }
}
