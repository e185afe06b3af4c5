//! Writing a sandbox to disk: pauses, copies for templates and forks, and the end of a slot.

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
    record::{Durability, Kept, Record, SlotDir, private_dir},
    spec::PauseMode,
};

/// Writing much memory to a slow disk takes its time; more than this is a failure.
const SAVE: Duration = Duration::from_secs(300);

/// A control connection: the one that is open, or a new one.
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

/// What a pause needs.
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
pub(crate) enum Paused {
    /// Everything is on disk, as the record says.
    OnDisk(Box<Record>),
    /// It failed, and the VM goes on.
    Kept(WorkError),
    /// It failed, and the VM cannot go on.
    Lost(WorkError),
}

impl PausePlan {
    /// Writes the sandbox to disk. The VM is left standing still, to be killed.
    pub(crate) fn run(mut self) -> Paused {
        let lineage = self.record.lineage.clone();
        let mut control = match control(self.control.take(), &self.dir, lineage) {
            Ok(control) => control,
            Err(e) => return Paused::Lost(e),
        };
        match self.save(&mut control) {
            Ok(()) => Paused::OnDisk(Box::new(self.record)),
            Err(e) => {
                // Half a snapshot is of no use.
                let _ = fs::remove_dir_all(self.dir.pause());
                match control.resume() {
                    Ok(()) => Paused::Kept(e),
                    Err(_) => Paused::Lost(e),
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
        self.dir
            .sync_note()
            .and_then(|()| sync_dir(&pause))
            .and_then(|()| self.dir.write(&self.record, Durability::Host))
            .map_err(|e| WorkError::Io("write the sandbox's record", e))
    }

    /// What the guest has not written to its disk would be lost.
    fn sync(&self) -> Result<(), WorkError> {
        let mut client = connect_agent(&self.dir.vsock(), self.timeout)?;
        client.set_access_token(self.record.init.access_token.clone());
        let mut request = ExecRequest::new("/bin/sync", &[]);
        request.user = Some("root".to_owned());
        client
            .exec(&request, self.timeout)
            .map_err(|e| WorkError::Agent("have the guest write its disk", e))
            .map(|_| ())
    }
}

/// Makes every file of a directory survive a crash of the host.
fn sync_dir(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_file() {
            fs::File::open(path)?.sync_all()?;
        }
    }
    fs::File::open(dir)?.sync_all()
}

/// Makes a template survive a crash of the host; a failure is told of, for the template is usable.
pub(crate) fn sync_tree(home: &Path) {
    let image = home.join("image");
    let synced = if image.is_dir() {
        sync_dir(&image)
    } else {
        Ok(())
    };
    if let Err(error) = synced.and_then(|()| sync_dir(home)) {
        tracing::warn!(dir = %home.display(), %error, "not on the disk yet");
    }
}

/// A copy of a running VM, which goes on.
#[derive(Debug)]
pub(crate) struct CopyPlan {
    pub(crate) dir: SlotDir,
    pub(crate) control: Option<UnixStream>,
    /// Of the VM's record.
    pub(crate) lineage: Option<Lineage>,
    pub(crate) to: PathBuf,
}

impl CopyPlan {
    /// Writes the copy and lets the VM go on.
    ///
    /// # Errors
    /// The first value: it failed, and the VM goes on. With `true` beside it, it does not.
    pub(crate) fn run(mut self) -> Result<(), (WorkError, bool)> {
        let lineage = self.lineage.take();
        let mut control =
            control(self.control.take(), &self.dir, lineage).map_err(|e| (e, true))?;
        let written = control.snapshot_diff(&self.to);
        let resumed = control.resume();
        match (written, resumed) {
            (Ok(()), Ok(())) => Ok(()),
            (written, resumed) => {
                let _ = fs::remove_dir_all(&self.to);
                let dead = resumed.is_err();
                let cause = written.and(resumed).err();
                let error = cause.map_or_else(
                    || WorkError::Image("the copy failed".to_owned()),
                    |e| WorkError::Control("copy the VM", e),
                );
                Err((error, dead))
            }
        }
    }
}

/// The files of a snapshot under another name: they never change, so a second link is a copy.
pub(crate) fn link_snapshot(from: &Path, to: &Path) -> Result<(), WorkError> {
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
        WorkError::Io("copy the snapshot", e)
    })
}

/// Removes what is left of a slot whose VM is gone.
///
/// # Errors
/// A file or a control group cannot be removed; the next server will try again.
pub(crate) fn clean(dir: &SlotDir, groups: &Groups, id: &str) -> io::Result<()> {
    let files = dir.remove();
    groups.remove(id).and(files)
}
