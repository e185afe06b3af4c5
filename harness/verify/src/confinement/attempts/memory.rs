//! Memory and descriptors of other processes, and control over them. The targets are another sandbox and a process of
//! root.

use nix::libc;

use super::attempt::{Attempt, Change, Class, USUAL, changed_if, no_change, staged};
use crate::confinement::{
    intruder::{Intruder, Stop, Try},
    process,
    scene::{SECRET, Scene},
};

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "memory-read-by-proc",
        class: Class::Memory,
        why: "The memory of another sandbox contains all its data.",
        refusals: USUAL,
        act: |i, s| {
            let victim = staged(s.victim())?;
            let path = format!("/proc/{}/mem", victim.clone.pid());
            let file = i.open(path, libc::O_RDONLY)?;
            i.read_secret(file, victim.secret_at, &s.secret)
        },
        look: no_change,
    },
    Attempt {
        name: "memory-write-by-proc",
        class: Class::Memory,
        why: "A write to another guest's memory can run code in that guest.",
        refusals: USUAL,
        act: |i, s| {
            let victim = staged(s.victim())?;
            let path = format!("/proc/{}/mem", victim.clone.pid());
            let file = i.open(path, libc::O_RDWR)?;
            let bytes = i.put(b"defaced")?;
            let arguments = [file, bytes, 7, victim.secret_at.cast_signed()];
            i.attempt("pwrite64", libc::SYS_pwrite64, &arguments)
        },
        look: defaced,
    },
    Attempt {
        name: "memory-read-across",
        class: Class::Memory,
        why: "process_vm_readv reads another process's memory without a file.",
        refusals: USUAL,
        act: |i, s| {
            let victim = staged(s.victim())?;
            let room = i.room(SECRET)?;
            let places = (room, victim.secret_at);
            read_across(i, victim.clone.pid(), places)?;
            i.compare(room, &s.secret)
        },
        look: no_change,
    },
    Attempt {
        name: "memory-write-across",
        class: Class::Memory,
        why: "process_vm_writev writes another process's memory without a file.",
        refusals: USUAL,
        act: |i, s| {
            let victim = staged(s.victim())?;
            let bytes = i.put(&[b'x'; SECRET])?;
            let places = (bytes, victim.secret_at);
            let call = ("process_vm_writev", libc::SYS_process_vm_writev);
            across(i, call, victim.clone.pid(), places)
        },
        look: defaced,
    },
    Attempt {
        name: "memory-read-roots",
        class: Class::Memory,
        why: "The server that owns all sandboxes is such a process.",
        refusals: USUAL,
        act: |i, s| {
            let root = staged(s.root())?;
            let room = i.room(SECRET)?;
            read_across(i, root.pid(), (room, root.secret_at))?;
            i.compare(room, &s.secret)
        },
        look: no_change,
    },
    Attempt {
        name: "memory-layout",
        class: Class::Memory,
        why: "Address space randomization is useless if the addresses can be read.",
        refusals: USUAL,
        act: |i, s| {
            let pid = staged(s.victim())?.clone.pid();
            let file = i.open(format!("/proc/{pid}/maps"), libc::O_RDONLY)?;
            let room = i.room(64)?;
            i.attempt("read", libc::SYS_read, &[file, room, 64])
        },
        look: no_change,
    },
    Attempt {
        name: "memory-neighbours-descriptor",
        class: Class::Memory,
        why: "Another sandbox's control socket and disk are descriptors of its VMM.",
        refusals: USUAL,
        act: |i, s| {
            let process = pidfd(i, staged(s.victim())?.clone.pid())?;
            i.attempt("pidfd_getfd", libc::SYS_pidfd_getfd, &[process, 0, 0])
        },
        look: no_change,
    },
    Attempt {
        name: "memory-neighbours-file",
        class: Class::Memory,
        why: "An open file of another sandbox can be opened again. The attempt only opens it.",
        refusals: USUAL,
        act: |i, s| {
            let pid = staged(s.victim())?.clone.pid();
            let all = staged(process::descriptors(pid))?;
            let console = all.iter().find(|(_, link)| link.ends_with("console.log"));
            let (number, _) = console
                .ok_or_else(|| Stop::Broken("the other sandbox has no console".to_owned()))?;
            i.open(format!("/proc/{pid}/fd/{number}"), libc::O_RDWR)
                .map(|_| ())
        },
        look: no_change,
    },
    Attempt {
        name: "ptrace-neighbour",
        class: Class::Ptrace,
        why: "A tracer controls the registers and memory of a process.",
        refusals: USUAL,
        act: |i, s| {
            let pid = staged(s.victim())?.clone.pid();
            ptrace(i, libc::PTRACE_SEIZE, pid)
        },
        look: |s, i| traced(s.victim()?.clone.pid(), i),
    },
    Attempt {
        name: "ptrace-root",
        class: Class::Ptrace,
        why: "The server that owns all sandboxes is such a process.",
        refusals: USUAL,
        act: |i, s| ptrace(i, libc::PTRACE_SEIZE, staged(s.root())?.pid()),
        look: |s, i| traced(s.root()?.pid(), i),
    },
];

fn read_across(i: &mut Intruder, pid: u32, places: (i64, u64)) -> Try<()> {
    let call = ("process_vm_readv", libc::SYS_process_vm_readv);
    across(i, call, pid, places)
}

/// Copies [`SECRET`] bytes between an address of the VMM and an address of another process.
fn across(
    i: &mut Intruder,
    (name, number): (&'static str, i64),
    pid: u32,
    (own, other): (i64, u64),
) -> Try<()> {
    let bytes = i64::try_from(SECRET).unwrap_or(0);
    let ours = i.put_words(&[own, bytes])?;
    let theirs = i.put_words(&[other.cast_signed(), bytes])?;
    i.attempt(name, number, &[pid.into(), ours, 1, theirs, 1, 0])
}

pub(super) fn pidfd(i: &mut Intruder, pid: u32) -> Try<i64> {
    i.call("pidfd_open", libc::SYS_pidfd_open, &[pid.into(), 0])
}

fn ptrace(i: &mut Intruder, request: u32, pid: u32) -> Try<()> {
    let arguments = [request.into(), pid.into(), 0, 0];
    i.attempt("ptrace", libc::SYS_ptrace, &arguments)
}

fn traced(pid: u32, i: &Intruder) -> Change {
    let tracer = process::status(pid, "TracerPid");
    changed_if(tracer == Some(i.pid().to_string()), "the process is traced")
}

fn defaced(s: &Scene, _: &Intruder) -> Change {
    let held = s.victim()?.holds(&s.secret);
    changed_if(!held, "the other sandbox's memory has changed")
}
