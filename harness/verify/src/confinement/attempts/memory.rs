//! Memory, descriptors and control of other processes: a neighbour and a process of root's.

use nix::libc;

use super::{
    super::{
        intruder::{self, Intruder, Stop, Try},
        scene::{SECRET, Scene},
        witness,
    },
    Attempt, Class, Seen, USUAL, answer_alone, staged, when,
};

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "memory-read-by-proc",
        class: Class::Memory,
        why: "All that another sandbox has in its memory.",
        refusals: USUAL,
        act: |i, s| {
            let victim = staged(s.victim())?;
            let path = format!("/proc/{}/mem", victim.clone.pid());
            let file = i.open(path, libc::O_RDONLY)?;
            i.read_secret(file, victim.secret_at, &s.secret)
        },
        look: answer_alone,
    },
    Attempt {
        name: "memory-write-by-proc",
        class: Class::Memory,
        why: "With another guest's memory comes code in that guest.",
        refusals: USUAL,
        act: |i, s| {
            let victim = staged(s.victim())?;
            let path = format!("/proc/{}/mem", victim.clone.pid());
            let file = i.open(path, libc::O_RDWR)?;
            let bytes = i.put(b"defaced")?;
            let arguments = [file, bytes, 7, victim.secret_at.cast_signed()];
            i.call("pwrite64", libc::SYS_pwrite64, &arguments)
                .map(|_| ())
        },
        look: defaced,
    },
    Attempt {
        name: "memory-read-across",
        class: Class::Memory,
        why: "The same without a file.",
        refusals: USUAL,
        act: |i, s| {
            let victim = staged(s.victim())?;
            let room = i.room(SECRET)?;
            let places = (room, victim.secret_at);
            read_across(i, victim.clone.pid(), places)?;
            i.compare(room, &s.secret)
        },
        look: answer_alone,
    },
    Attempt {
        name: "memory-write-across",
        class: Class::Memory,
        why: "The same without a file.",
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
        look: answer_alone,
    },
    Attempt {
        name: "memory-layout",
        class: Class::Memory,
        why: "Addresses of another process are what its randomisation hides.",
        refusals: USUAL,
        act: |i, s| {
            let pid = staged(s.victim())?.clone.pid();
            let file = i.open(format!("/proc/{pid}/maps"), libc::O_RDONLY)?;
            let room = i.room(64)?;
            i.call("read", libc::SYS_read, &[file, room, 64])
                .map(|_| ())
        },
        look: answer_alone,
    },
    Attempt {
        name: "memory-neighbours-descriptor",
        class: Class::Memory,
        why: "Its control socket and its disk are descriptors.",
        refusals: USUAL,
        act: |i, s| {
            let process = pidfd(i, staged(s.victim())?.clone.pid())?;
            i.call("pidfd_getfd", libc::SYS_pidfd_getfd, &[process, 0, 0])
                .map(|_| ())
        },
        look: answer_alone,
    },
    Attempt {
        name: "memory-neighbours-file",
        class: Class::Memory,
        why: "A file that it has open, opened again. Opened and no more.",
        refusals: USUAL,
        act: |i, s| {
            let pid = staged(s.victim())?.clone.pid();
            let all = staged(intruder::descriptors(pid))?;
            let console = all.iter().find(|(_, link)| link.ends_with("console.log"));
            let (number, _) =
                console.ok_or_else(|| Stop::Broken("the neighbour has no console".to_owned()))?;
            i.open(format!("/proc/{pid}/fd/{number}"), libc::O_RDWR)
                .map(|_| ())
        },
        look: answer_alone,
    },
    Attempt {
        name: "ptrace-neighbour",
        class: Class::Ptrace,
        why: "A tracer owns registers and memory.",
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

/// As many bytes as a secret has, between an address here and one there.
fn across(
    i: &mut Intruder,
    (name, number): (&'static str, i64),
    pid: u32,
    (here, there): (i64, u64),
) -> Try<()> {
    let bytes = i64::try_from(SECRET).unwrap_or(0);
    let ours = i.put_words(&[here, bytes])?;
    let theirs = i.put_words(&[there.cast_signed(), bytes])?;
    i.call(name, number, &[pid.into(), ours, 1, theirs, 1, 0])
        .map(|_| ())
}

pub(super) fn pidfd(i: &mut Intruder, pid: u32) -> Try<i64> {
    i.call("pidfd_open", libc::SYS_pidfd_open, &[pid.into(), 0])
}

fn ptrace(i: &mut Intruder, request: u32, pid: u32) -> Try<()> {
    let arguments = [request.into(), pid.into(), 0, 0];
    i.call("ptrace", libc::SYS_ptrace, &arguments).map(|_| ())
}

fn traced(pid: u32, i: &Intruder) -> Seen {
    let tracer = witness::status(pid, "TracerPid");
    when(tracer == Some(i.pid().to_string()), "the process is traced")
}

fn defaced(s: &Scene, _: &Intruder) -> Seen {
    let held = s.victim()?.holds(&s.secret);
    when(!held, "the neighbour's memory has other bytes")
}
