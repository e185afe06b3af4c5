//! Signals to another sandbox and to a process of root, by every system call that sends signals.

use std::time::Duration;

use nix::{errno::Errno, libc, sys::signal::Signal};

use super::attempt::{Attempt, Change, Class, Refusal, USUAL, changed_if, staged};
use super::memory::pidfd;
use crate::confinement::{
    intruder::{Intruder, Stop, Try},
    process,
    scene::Scene,
};

const KILL: i64 = libc::SIGKILL as i64;
/// Ends a process that has no handler for this signal.
const USR1: i64 = libc::SIGUSR1 as i64;
/// Sets the process that a socket signals (`asm-generic/sockios.h`).
const FIOSETOWN: u64 = 0x8901;
/// fcntl(2) command that sets the owner of a descriptor by kind, and the kind for a process.
const F_SETOWN_EX: i32 = 15;
const F_OWNER_PID: u32 = 1;
/// Time for SIGIO to arrive and end a process that has no handler for it.
const SIGNALLED: Duration = Duration::from_millis(100);
/// For an owner that the process may not signal, the kernel reports no error and just does not send the signal.
const OWNERS: &[Refusal] = &[
    Refusal::Death(Signal::SIGSYS),
    Refusal::Error(Errno::EPERM),
    Refusal::NoEffect,
];

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "signal-root",
        class: Class::Signals,
        why: "Services of the host would end.",
        refusals: USUAL,
        act: |i, s| {
            let pid = staged(s.root())?.pid();
            i.attempt("kill", libc::SYS_kill, &[pid.into(), KILL])
        },
        look: root_ended,
    },
    Attempt {
        name: "signal-neighbour",
        class: Class::Signals,
        why: "Another sandbox would end.",
        refusals: USUAL,
        act: |i, s| {
            let pid = staged(s.victim())?.clone.pid();
            i.attempt("kill", libc::SYS_kill, &[pid.into(), KILL])
        },
        look: neighbour_ended,
    },
    Attempt {
        name: "signal-thread-of-neighbour",
        class: Class::Signals,
        why: "The VMM needs tgkill for its own threads, so the filter cannot forbid it altogether.",
        refusals: USUAL,
        act: |i, s| {
            let pid = i64::from(staged(s.victim())?.clone.pid());
            i.attempt("tgkill", libc::SYS_tgkill, &[pid, pid, KILL])
        },
        look: neighbour_ended,
    },
    Attempt {
        name: "signal-thread-of-root",
        class: Class::Signals,
        why: "The VMM needs tgkill for its own threads, so the filter cannot forbid it altogether.",
        refusals: USUAL,
        act: |i, s| {
            let pid = i64::from(staged(s.root())?.pid());
            i.attempt("tgkill", libc::SYS_tgkill, &[pid, pid, KILL])
        },
        look: root_ended,
    },
    Attempt {
        name: "signal-thread-without-group",
        class: Class::Signals,
        why: "tkill is the older form of tgkill.",
        refusals: USUAL,
        act: |i, s| {
            let pid = i64::from(staged(s.root())?.pid());
            i.attempt("tkill", libc::SYS_tkill, &[pid, KILL])
        },
        look: root_ended,
    },
    Attempt {
        name: "signal-queued",
        class: Class::Signals,
        why: "rt_sigqueueinfo sends a signal with a sender that may be forged.",
        refusals: USUAL,
        act: |i, s| {
            let pid = i64::from(staged(s.root())?.pid());
            // A `siginfo_t` has 128 bytes. Its code is SI_QUEUE.
            let mut info = [0; 128];
            info[8..12].copy_from_slice(&libc::SI_QUEUE.to_ne_bytes());
            let info = i.put(&info)?;
            let arguments = [pid, USR1, info];
            i.attempt("rt_sigqueueinfo", libc::SYS_rt_sigqueueinfo, &arguments)
        },
        look: root_ended,
    },
    Attempt {
        name: "signal-by-descriptor",
        class: Class::Signals,
        why: "pidfd_send_signal signals a process through a descriptor.",
        refusals: USUAL,
        act: |i, s| {
            let process = pidfd(i, staged(s.victim())?.clone.pid())?;
            let arguments = [process, KILL, 0, 0];
            i.attempt("pidfd_send_signal", libc::SYS_pidfd_send_signal, &arguments)
        },
        look: neighbour_ended,
    },
    Attempt {
        name: "signal-by-readiness",
        class: Class::Signals,
        why: "A descriptor that becomes ready signals its owner, which F_SETOWN selects.",
        refusals: OWNERS,
        act: |i, s| {
            let (near, far) = i.socket_pair()?;
            let pid = staged(s.root())?.pid();
            i.fcntl(near, libc::F_SETOWN, pid.into())?;
            make_ready(i, s, (near, far))
        },
        look: root_ended,
    },
    Attempt {
        name: "signal-by-owner-of-a-kind",
        class: Class::Signals,
        why: "F_SETOWN_EX selects the owner too. The VMM needs it to interrupt its own thread.",
        refusals: OWNERS,
        act: |i, s| {
            let (near, far) = i.socket_pair()?;
            let pid = staged(s.root())?.pid();
            let owner = i.put(&[F_OWNER_PID.to_ne_bytes(), pid.to_ne_bytes()].concat())?;
            i.fcntl(near, F_SETOWN_EX, owner)?;
            make_ready(i, s, (near, far))
        },
        look: root_ended,
    },
    Attempt {
        name: "signal-by-owner-of-socket",
        class: Class::Signals,
        why: "The ioctl FIOSETOWN selects the owner of a socket too.",
        refusals: OWNERS,
        act: |i, s| {
            let (near, far) = i.socket_pair()?;
            let pid = staged(s.root())?.pid();
            let owner = i.put(&pid.to_ne_bytes())?;
            i.ioctl(near, FIOSETOWN, owner)?;
            make_ready(i, s, (near, far))
        },
        look: root_ended,
    },
];

/// Makes the descriptor `near` ready, so that the kernel signals its owner. No system call fails if the VMM may not
/// signal the owner.
fn make_ready(i: &mut Intruder, s: &Scene, (near, far): (i64, i64)) -> Try<()> {
    i.fcntl(near, libc::F_SETFL, libc::O_ASYNC.into())?;
    i.write(far, b"ready")?;
    let pid = staged(s.root())?.pid();
    if process::ends_within(pid, SIGNALLED) {
        Ok(())
    } else {
        Err(Stop::Futile("the owner is still running"))
    }
}

fn root_ended(s: &Scene, _: &Intruder) -> Change {
    changed_if(!process::is_alive(s.root()?.pid()), "the process has ended")
}

fn neighbour_ended(s: &Scene, _: &Intruder) -> Change {
    changed_if(!s.victim()?.clone.is_alive(), "the other sandbox has ended")
}
