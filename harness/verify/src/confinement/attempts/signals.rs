//! Signals to a neighbour and to a process of root's, by each call that sends them.

use std::time::Duration;

use nix::{errno::Errno, libc, sys::signal::Signal};

use super::{
    super::{
        intruder::{Intruder, Stop, Try},
        process,
        scene::Scene,
    },
    Attempt, Change, Class, Refusal, USUAL, changed_if,
    memory::pidfd,
    staged,
};

const KILL: i64 = libc::SIGKILL as i64;
/// Ends a process that does not expect it.
const USR1: i64 = libc::SIGUSR1 as i64;
/// Names the process that a socket signals (`asm-generic/sockios.h`).
const FIOSETOWN: u64 = 0x8901;
/// Of fcntl(2): an owner that is a process, a group or a thread.
const F_SETOWN_EX: i32 = 15;
const F_OWNER_PID: u32 = 1;
/// SIGIO, which ends a process that does not expect it, arrives by then.
const SIGNALLED: Duration = Duration::from_millis(100);
/// The kernel does not tell who names an owner that it may not signal; it sends no signal.
const OWNERS: &[Refusal] = &[
    Refusal::Death(Signal::SIGSYS),
    Refusal::Error(Errno::EPERM),
    Refusal::NoEffect,
];

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "signal-root",
        class: Class::Signals,
        why: "The host's services end.",
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
        why: "Another sandbox ends.",
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
        why: "The call that a VMM needs for its own threads.",
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
        why: "The call that a VMM needs for its own threads.",
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
        why: "The older form of the same.",
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
        why: "A signal that names its sender, and may lie.",
        refusals: USUAL,
        act: |i, s| {
            let pid = i64::from(staged(s.root())?.pid());
            // A siginfo_t of 128 bytes whose code is SI_QUEUE.
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
        why: "A process named by a descriptor.",
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
        why: "A descriptor that becomes ready signals its owner, which fcntl names.",
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
        why: "The same by the command that a VMM needs to kick its own thread.",
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
        why: "The same owner, named by ioctl.",
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

/// Has the owner of the first one signalled. No call fails if the owner is not the process's to signal.
fn make_ready(i: &mut Intruder, s: &Scene, (near, far): (i64, i64)) -> Try<()> {
    i.fcntl(near, libc::F_SETFL, libc::O_ASYNC.into())?;
    i.write(far, b"ready")?;
    let pid = staged(s.root())?.pid();
    match process::ends_within(pid, SIGNALLED) {
        true => Ok(()),
        false => Err(Stop::Futile("its owner lives")),
    }
}

fn root_ended(s: &Scene, _: &Intruder) -> Change {
    changed_if(!process::is_alive(s.root()?.pid()), "the process has ended")
}

fn neighbour_ended(s: &Scene, _: &Intruder) -> Change {
    changed_if(!s.victim()?.clone.is_alive(), "the neighbour has ended")
}
