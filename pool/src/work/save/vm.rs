//! Saving a running VM, which then runs on.

use std::{fs, io, os::unix::net::UnixStream, path::Path, time::Duration};

use api_types::envd::ExecRequest;
use model::template_file;
use template::until_quiet;
use vmm_control::{ControlClient, ControlError, files::Lineage};

use super::{SnapshotFailed, WorkError, connect_agent, control};
use crate::{durable::private_dir, record::SlotDir};

/// How long the guest may take to write its caches to the layer: a build step may leave gigabytes.
const SYNC: Duration = Duration::from_secs(120);

/// The parts of a VM to save.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// Memory, CPU and disk, as a diff against the template if that still exists.
    Diff,
    /// Memory, CPU and disk, without a base. The guest syncs its disk first, and has become quiet if it does within ten
    /// seconds: every clone repeats what is left to do.
    Whole(Guest),
    /// The layer alone. The guest syncs its disk first.
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
    if let Content::Whole(guest) | Content::Disk(guest) = content {
        sync(dir, guest.token.clone(), SYNC).map_err(SnapshotFailed::Unchanged)?;
    }
    let mut control = control(open, dir, lineage).map_err(SnapshotFailed::Lost)?;
    let written = write(&mut control, content, to);
    let resumed = control.resume();
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
            if until_quiet(control, guest.pid).map_err(failed)?.is_none() {
                tracing::warn!(to = %to.display(), "the guest is not quiet: clones of the template may start slower");
            }
            control.snapshot(to).map_err(failed)
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

/// Runs `sync` in the guest, because only the guest's disk is kept, not the caches in its memory.
pub(super) fn sync(
    dir: &SlotDir,
    token: Option<String>,
    timeout: Duration,
) -> Result<(), WorkError> {
    let failed = |e| WorkError::Agent("run sync in the guest", e);
    let mut client = connect_agent(&dir.vsock(), timeout)?;
    client.set_access_token(token);
    let mut request = ExecRequest::new("/bin/sync", &[]);
    request.user = Some("root".to_owned());
    let done = client.exec(&request, timeout).map_err(failed)?;
    match done.exit_code {
        0 => Ok(()),
        code => Err(WorkError::Io(
            "run sync in the guest",
            io::Error::other(format!("it failed with status {code}")),
        )),
    }
}
