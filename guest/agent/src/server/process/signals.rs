//! Signals of the agent: requests to end, and ends of its children.

use nix::errno::Errno;

use super::{
    super::{
        core::{Core, Job},
        freeze,
    },
    end,
};
use crate::sys;

/// Reads all pending signals.
pub(crate) fn read(core: &mut Core) {
    while let Ok(Some(info)) = core.signals.read_signal() {
        match i32::try_from(info.ssi_signo) {
            Ok(libc::SIGTERM | libc::SIGINT) => core.ending = true,
            _ => reap(core),
        }
    }
}

/// Reaps all dead children: processes of the table, and orphans that the agent has adopted.
fn reap(core: &mut Core) {
    loop {
        let (pid, status) = match sys::reap() {
            Ok(Some(dead)) => dead,
            Err(Errno::EINTR) => continue,
            Ok(None) | Err(_) => return,
        };
        let Some(end) = end::end_event(status) else {
            continue;
        };
        freeze::ended(core, pid);
        let mut all = core.processes.iter();
        let known = all.find(|(_, p)| p.pid == pid && p.status.is_none());
        let known = known.map(|(key, _)| key);
        drop(all);
        let Some(key) = known else {
            continue;
        };
        if let Some(process) = core.processes.get_mut(key) {
            process.reaped(end);
        }
        core.enqueue(Job::Process, key);
    }
}
