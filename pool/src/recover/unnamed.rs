//! Finds the VMMs of sandboxes whose records do not name one, because an older release wrote them.

use std::{collections::HashMap, fs, os::unix::fs::MetadataExt, path::PathBuf};

use library::{
    durable::Durability,
    manifest::Manifest,
    vmms::{VmmId, Vmms},
};
use model::{SandboxId, TEMPLATE_FORMAT};

use crate::{
    driver::entry::Entry,
    record::Record,
    state::{PauseMode, SandboxState},
};

/// Finds the VMM of each sandbox whose record names none. A running VMM's program is copied from its process, even if
/// its file has been replaced. The current VMM can read a pause in this release's format. This is written to the
/// record, so that the pause stays usable after the next upgrade. Failures are logged: the current VMM is then tried
/// for the sandbox.
pub(crate) fn name(entries: &mut [(SandboxId, Entry)], vmms: &mut Vmms) {
    let mut known = HashMap::new();
    for (id, entry) in entries
        .iter_mut()
        .filter(|(_, e)| e.record.vmm_id.is_none())
    {
        let found = match entry.slot.state() {
            Some(SandboxState::Running) => of_process(&entry.record, vmms, &mut known),
            Some(SandboxState::Paused(PauseMode::Memory)) => of_pause(entry, vmms),
            Some(SandboxState::Paused(PauseMode::FilesystemOnly)) | None => Ok(None),
        };
        match found {
            Ok(vmm) => entry.record.vmm_id = vmm,
            Err(why) => tracing::warn!(sandbox = %id, why, "cannot keep the sandbox's VMM"),
        }
    }
}

fn of_process(
    record: &Record,
    vmms: &mut Vmms,
    known: &mut HashMap<(u64, u64), VmmId>,
) -> Result<Option<VmmId>, String> {
    let Some(process) = record.vmm else {
        return Ok(None);
    };
    let program = PathBuf::from(format!("/proc/{}/exe", process.pid));
    let meta = fs::metadata(&program).map_err(|e| format!("{}: {e}", program.display()))?;
    let file = (meta.dev(), meta.ino());
    if let Some(id) = known.get(&file) {
        return Ok(Some(id.clone()));
    }
    let id = vmms.keep(&program).map_err(|e| e.to_string())?;
    // The process id may have been reused by another program.
    if !process.is_alive() {
        return Ok(None);
    }
    known.insert(file, id.clone());
    Ok(Some(id))
}

fn of_pause(entry: &Entry, vmms: &Vmms) -> Result<Option<VmmId>, String> {
    if Manifest::read(&entry.dir.pause())?.format != TEMPLATE_FORMAT {
        return Ok(None);
    }
    let record = Record {
        vmm_id: Some(vmms.current().clone()),
        ..entry.record.clone()
    };
    entry
        .dir
        .write(&record, Durability::Host)
        .map_err(|e| e.to_string())?;
    Ok(record.vmm_id)
}
