//! New processes and programs, which could outlive the sandbox or run new code.

use nix::{errno::Errno, libc, sys::signal::Signal};

use super::attempt::{Attempt, Change, Class, Refusal, USUAL, changed_if, staged};
use crate::confinement::{
    intruder::{Intruder, Try},
    scene::Scene,
};

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "process-fork",
        class: Class::Processes,
        why: "A copy of the VMM would keep the TAP open after the sandbox has ended.",
        refusals: USUAL,
        act: |i, _| i.attempt("fork", libc::SYS_fork, &[]),
        look: has_child,
    },
    Attempt {
        name: "process-vfork",
        class: Class::Processes,
        why: "vfork creates a process as fork does.",
        refusals: USUAL,
        act: |i, _| i.attempt("vfork", libc::SYS_vfork, &[]),
        look: has_child,
    },
    Attempt {
        name: "process-clone",
        class: Class::Processes,
        why: "clone, which creates threads, creates processes too.",
        refusals: USUAL,
        act: |i, _| {
            let flags = libc::SIGCHLD.into();
            i.attempt("clone", libc::SYS_clone, &[flags])
        },
        look: has_child,
    },
    Attempt {
        name: "process-clone-of-memory",
        class: Class::Processes,
        why: "A process that shares memory with the VMM is not one of its threads.",
        refusals: USUAL,
        act: |i, _| {
            let flags = libc::CLONE_VM | libc::CLONE_FILES | libc::SIGCHLD;
            let stack = i.room(4096)?;
            i.attempt("clone", libc::SYS_clone, &[flags.into(), stack])
        },
        look: has_child,
    },
    Attempt {
        name: "process-clone3",
        class: Class::Processes,
        why: "The arguments of clone3 are in memory, where the seccomp filter cannot check them.",
        refusals: &[
            Refusal::Death(Signal::SIGSYS),
            Refusal::Error(Errno::ENOSYS),
        ],
        act: |i, _| {
            // The first version of `struct clone_args` has eight words. The fifth is the signal sent when the child
            // ends.
            let words = [0, 0, 0, 0, libc::SIGCHLD.into(), 0, 0, 0];
            let arguments = i.put_words(&words)?;
            i.attempt("clone3", libc::SYS_clone3, &[arguments, 64])
        },
        look: has_child,
    },
    Attempt {
        name: "process-program",
        class: Class::Processes,
        why: "A shell or any other program could be started.",
        refusals: USUAL,
        act: |i, s| {
            let path = i.path(&s.path("program"))?;
            i.attempt("execve", libc::SYS_execve, &[path, 0, 0])
        },
        look: is_replaced,
    },
    Attempt {
        name: "process-program-by-descriptor",
        class: Class::Processes,
        why: "A program that the guest sent needs no path.",
        refusals: USUAL,
        act: by_descriptor,
        look: is_replaced,
    },
];

fn by_descriptor(i: &mut Intruder, s: &Scene) -> Try<()> {
    let program = staged(std::fs::read(s.path("program")))?;
    let name = i.put(b"\0")?;
    let file = i.call("memfd_create", libc::SYS_memfd_create, &[name, 0])?;
    i.write(file, &program)?;
    let arguments = [file, name, 0, 0, libc::AT_EMPTY_PATH.into()];
    i.attempt("execveat", libc::SYS_execveat, &arguments)
}

fn has_child(_: &Scene, i: &Intruder) -> Change {
    changed_if(i.children > 0, "a process was created")
}

fn is_replaced(_: &Scene, i: &Intruder) -> Change {
    changed_if(i.replaced, "the VMM runs another program")
}
