//! Namespaces, mounts and roots: a place in which it would have rights again, or see other files.

use nix::libc;

use super::{
    super::{calls::AT_CWD, intruder::Intruder, process, scene::Scene},
    Attempt, Change, Class, FILTER, USUAL, changed_if, no_change, staged,
};

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "namespace-user",
        class: Class::Namespaces,
        why: "Any user has all capabilities in a namespace of its own, and most of the kernel is in reach.",
        refusals: FILTER,
        act: |i, _| {
            // A process with a thread of the kernel's cannot unshare it, but has children.
            let flags = libc::CLONE_NEWUSER | libc::SIGCHLD;
            i.attempt("clone", libc::SYS_clone, &[flags.into()])
        },
        look: |_, i| changed_if(i.children > 0, "a process was made in one"),
    },
    Attempt {
        name: "namespace-network",
        class: Class::Namespaces,
        why: "A network without the sandbox's policy.",
        refusals: USUAL,
        act: |i, _| unshare(i, libc::CLONE_NEWNET),
        look: |_, i| moved(i, "net"),
    },
    Attempt {
        name: "namespace-mounts",
        class: Class::Namespaces,
        why: "Mounts of its own hide files from programs that run as root.",
        refusals: USUAL,
        act: |i, _| unshare(i, libc::CLONE_NEWNS),
        look: |_, i| moved(i, "mnt"),
    },
    Attempt {
        name: "namespace-of-neighbour",
        class: Class::Namespaces,
        why: "The neighbour's network, if it has one of its own.",
        refusals: USUAL,
        act: |i, s| {
            let process = super::memory::pidfd(i, staged(s.victim())?.clone.pid())?;
            let arguments = [process, libc::CLONE_NEWNET.into()];
            i.attempt("setns", libc::SYS_setns, &arguments)
        },
        look: no_change,
    },
    Attempt {
        name: "root-change",
        class: Class::Namespaces,
        why: "Another root brings other libraries and settings to programs of root's.",
        refusals: USUAL,
        act: |i, s| {
            let path = i.path(&s.path("public"))?;
            i.attempt("chroot", libc::SYS_chroot, &[path])
        },
        look: |s, i| {
            let root = process::link(i.pid(), "root");
            changed_if(root == Some(s.path("public")), "its root is another")
        },
    },
    Attempt {
        name: "mount-over",
        class: Class::Namespaces,
        why: "A mount over a directory replaces what all programs find there.",
        refusals: USUAL,
        act: |i, s| {
            let place = i.path(&s.path("public"))?;
            let kind = i.put(b"tmpfs\0")?;
            i.attempt("mount", libc::SYS_mount, &[kind, place, kind, 0, 0])
        },
        look: |s, i| mounted(s, i),
    },
    Attempt {
        name: "mount-by-descriptor",
        class: Class::Namespaces,
        why: "The newer calls for the same.",
        refusals: USUAL,
        act: |i, _| {
            let kind = i.put(b"tmpfs\0")?;
            i.attempt("fsopen", libc::SYS_fsopen, &[kind, 0])
        },
        look: no_change,
    },
    Attempt {
        name: "mount-copy",
        class: Class::Namespaces,
        why: "A copy of the host's tree that no later change reaches.",
        refusals: USUAL,
        act: |i, _| {
            let root = i.put(b"/\0")?;
            // OPEN_TREE_CLONE of `linux/mount.h`.
            i.attempt("open_tree", libc::SYS_open_tree, &[AT_CWD, root, 1])
        },
        look: no_change,
    },
    Attempt {
        name: "host-name",
        class: Class::Namespaces,
        why: "The name is the whole host's. It is set to what it is.",
        refusals: USUAL,
        act: |i, _| {
            let name = staged(std::fs::read_to_string("/proc/sys/kernel/hostname"))?;
            let name = name.trim_end();
            let at = i.put(name.as_bytes())?;
            let length = super::super::calls::length(name.as_bytes())?;
            i.attempt("sethostname", libc::SYS_sethostname, &[at, length])
        },
        look: no_change,
    },
];

fn unshare(i: &mut Intruder, what: i32) -> super::Try<()> {
    i.attempt("unshare", libc::SYS_unshare, &[what.into()])
}

fn moved(i: &Intruder, namespace: &str) -> Change {
    changed_if(
        process::has_other_namespace(i.pid(), namespace),
        "it is in another namespace",
    )
}

/// Whether something is mounted there; it is taken away again.
fn mounted(s: &Scene, _: &Intruder) -> Change {
    let done = nix::mount::umount(&s.path("public"));
    changed_if(done.is_ok(), "something was mounted there")
}
