//! Counts the shadow page table entries that KVM sets for a VMM, by trace events.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

const INSTANCES: &str = "/sys/kernel/tracing/instances";
/// Size of the trace buffer in KiB, enough for the entries of one stage.
const BUFFER_KIB: &str = "8192";

/// A tracing instance of this process, removed on drop.
pub(crate) struct Trace {
    dir: PathBuf,
}

impl Trace {
    /// Creates the instance. `None` if the event is unavailable: KVM without shadow paging, no root, no tracefs.
    pub(crate) fn begin() -> Option<Self> {
        let dir = Path::new(INSTANCES).join(format!("first-cell-{}", std::process::id()));
        fs::create_dir(&dir).ok()?;
        let this = Self { dir };
        this.write("buffer_size_kb", BUFFER_KIB).ok()?;
        this.write("events/kvmmmu/kvm_mmu_set_spte/enable", "1")
            .ok()?;
        Some(this)
    }

    /// Counts entries for a process from now on.
    pub(crate) fn follow(&self, pid: u32) -> Result<()> {
        self.write("set_event_pid", &pid.to_string())?;
        self.write("trace", "")
    }

    /// Entries since the last call.
    pub(crate) fn take(&self) -> Result<u64> {
        let text = fs::read_to_string(self.dir.join("trace")).context("cannot read the trace")?;
        self.write("trace", "")?;
        let entries = text.lines().filter(|line| line.contains("set_spte:"));
        Ok(entries.count() as u64)
    }

    fn write(&self, file: &str, word: &str) -> Result<()> {
        let path = self.dir.join(file);
        fs::write(&path, word).with_context(|| format!("cannot write {}", path.display()))
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // On failure an empty instance stays, which is harmless.
        let _ = fs::remove_dir(&self.dir);
    }
}
