//! Pins both ends of an exchange to one CPU when exchanges are compared.
//!
//! Without pinning, the scheduler may place the two ends differently for each connection. If they run on two CPUs, each
//! round trip wakes the other CPU, which takes longer than the differences that a comparison must detect.

use std::{fs, io};

use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

/// The CPU with the highest number in the affinity mask of this process.
pub(super) fn last_cpu() -> io::Result<CpuSet> {
    let all = sched_getaffinity(Pid::this())?;
    let last = (0..CpuSet::count())
        .rev()
        .find(|cpu| all.is_set(*cpu).unwrap_or(false));
    let mut one = CpuSet::new();
    one.set(last.ok_or(io::ErrorKind::NotFound)?)?;
    Ok(one)
}

/// Pins the calling thread.
pub(super) fn pin_thread(to: &CpuSet) -> io::Result<()> {
    Ok(sched_setaffinity(Pid::from_raw(0), to)?)
}

/// Pins all current threads of a process.
pub(super) fn pin_process(pid: u32, to: &CpuSet) -> io::Result<()> {
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let id: i32 = thread?
            .file_name()
            .to_string_lossy()
            .parse()
            .map_err(io::Error::other)?;
        sched_setaffinity(Pid::from_raw(id), to)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn processes_and_threads_are_pinned() {
        let one = last_cpu().unwrap();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        pin_process(child.id(), &one).unwrap();
        let raw = i32::try_from(child.id()).unwrap();
        let found = sched_getaffinity(Pid::from_raw(raw)).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, one);
        let own = std::thread::spawn(move || {
            pin_thread(&one).unwrap();
            (sched_getaffinity(Pid::from_raw(0)).unwrap(), one)
        });
        let (own, one) = own.join().unwrap();
        assert_eq!(own, one);
    }
}
