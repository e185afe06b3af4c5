//! Saving a running VM, which then runs on.

use std::{
    fs, io,
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use api_types::envd::{ClientError, EnvdClient, ExecRequest};
use model::template_file;
use template::until_quiet;
use vmm_control::{ControlClient, ControlError, files::Lineage};

use super::{SnapshotFailed, WorkError, connect_agent, control};
use crate::{durable::private_dir, record::SlotDir};

/// How long the guest may take to write its caches to the layer: a build step may leave gigabytes.
const SYNC: Duration = Duration::from_secs(120);

/// How long a frozen guest may take to be paused: half of the time after which it thaws by itself.
const FROZEN: Duration = Duration::from_secs(30);

/// The parts of a VM to save.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// Memory, CPU and disk, as a diff against the template if that still exists.
    Diff,
    /// Memory, CPU and disk, without a base. The guest syncs its disk first, and has become quiet if it does within ten
    /// seconds: every clone repeats what is left to do.
    Whole(Guest),
    /// The layer alone, frozen by the guest.
    Disk(Guest),
}

/// How to reach a guest's agent, and its VMM's process.
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
    // Nothing has changed as long as only the agent was asked.
    if let Content::Whole(guest) = content {
        sync(dir, guest.token.clone(), SYNC).map_err(SnapshotFailed::Unchanged)?;
    }
    let mut control = control(open, dir, lineage).map_err(SnapshotFailed::Lost)?;
    let frozen = match content {
        Content::Disk(guest) => {
            let token = guest.token.clone();
            let frozen = pause_with_consistent_disk(&mut control, dir, token, SYNC);
            Some(frozen.map_err(SnapshotFailed::Unchanged)?)
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
                tracing::warn!(to = %to.display(), "the guest is not quiet: clones of the template may start slower");
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

/// Pauses the VM with a disk that is consistent without the guest's memory. The returned guest must thaw the disk if the
/// VM runs on.
pub(super) fn pause_with_consistent_disk(
    control: &mut ControlClient,
    dir: &SlotDir,
    token: Option<String>,
    timeout: Duration,
) -> Result<Frozen, WorkError> {
    // Most is written here, while the guest's programs go on.
    let mut client = sync(dir, token, timeout)?;
    let since = Instant::now();
    let frozen = match client.freeze() {
        Ok(()) => Frozen(Some(client)),
        // An agent of an earlier version.
        Err(ClientError::Refused { status: 404, .. }) => Frozen(None),
        Err(error) => return Err(WorkError::Agent("freeze the guest's disk", error)),
    };
    match control.pause().map_err(failed) {
        Ok(()) if since.elapsed() < FROZEN => Ok(frozen),
        Ok(()) => {
            let _ = control.resume();
            frozen.thaw();
            Err(WorkError::Timeout(FROZEN))
        }
        Err(error) => {
            frozen.thaw();
            Err(error)
        }
    }
}

/// A guest whose disk is frozen. `None`: its agent cannot do that.
#[derive(Debug)]
pub(super) struct Frozen(Option<EnvdClient>);

impl Frozen {
    /// The VM must run.
    pub(super) fn thaw(self) {
        if let Some(Err(error)) = self.0.map(|mut client| client.thaw()) {
            tracing::warn!(%error, "cannot thaw a guest's disk: it thaws by itself within a minute");
        }
    }
}
