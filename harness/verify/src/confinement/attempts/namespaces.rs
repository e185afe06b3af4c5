//! Namespaces, mounts and root directories, in which the VMM would have more rights or see other files.

use nix::libc;

use super::attempt::{Attempt, Change, Class, FILTER, USUAL, changed_if, no_change, staged};
use crate::confinement::{
    calls::AT_CWD,
    intruder::{Intruder, Try},
    process,
    scene::Scene,
};

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "namespace-user",
        class: Class::Namespaces,
        why: "In a new user namespace, any user has all capabilities, which makes most of the kernel reachable.",
        refusals: FILTER,
        act: |i, _| {
            // KVM adds a kernel thread to a VMM, so the VMM cannot unshare its user namespace. Its child can have a new
            // one.
            let flags = libc::CLONE_NEWUSER | libc::SIGCHLD;
            i.attempt("clone", libc::SYS_clone, &[flags.into()])
        },
        look: |_, i| {
            changed_if(
                i.children > 0,
                "a process in a new user namespace was created",
            )
        },
    },
    Attempt {
        name: "namespace-network",
        class: Class::Namespaces,
        why: "The sandbox's policy does not apply in another network namespace.",
        refusals: USUAL,
        act: |i, _| unshare(i, libc::CLONE_NEWNET),
        look: |_, i| namespace_changed(i, "net"),
    },
    Attempt {
        name: "namespace-mounts",
        class: Class::Namespaces,
        why: "Mounts in a private namespace can hide files from programs that run as root.",
        refusals: USUAL,
        act: |i, _| unshare(i, libc::CLONE_NEWNS),
        look: |_, i| namespace_changed(i, "mnt"),
    },
    Attempt {
        name: "namespace-of-neighbour",
        class: Class::Namespaces,
        why: "Another sandbox's network namespace, if it has one, has its own policy.",
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
        why: "With another root directory, programs of root use other libraries and settings.",
        refusals: USUAL,
        act: |i, s| {
            let path = i.path(&s.path("public"))?;
            i.attempt("chroot", libc::SYS_chroot, &[path])
        },
        look: |s, i| {
            let root = process::link(i.pid(), "root");
            changed_if(
                root == Some(s.path("public")),
                "the root directory has changed",
            )
        },
    },
    Attempt {
        name: "mount-over",
        class: Class::Namespaces,
        why: "A mount over a directory replaces its content for all programs.",
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
        why: "The newer mount API can do the same as mount.",
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
        why: "A copy of the host's file tree is not affected by later changes.",
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
        why: "The host name is the name of the whole host. The attempt sets it to its current value.",
        refusals: USUAL,
        act: |i, _| {
            let name = staged(std::fs::read_to_string("/proc/sys/kernel/hostname"))?;
            let name = name.trim_end();
            let at = i.put(name.as_bytes())?;
            let length = crate::confinement::calls::length(name.as_bytes())?;
            i.attempt("sethostname", libc::SYS_sethostname, &[at, length])
        },
        look: no_change,
    },
];

fn unshare(i: &mut Intruder, what: i32) -> Try<()> {
    i.attempt("unshare", libc::SYS_unshare, &[what.into()])
}

fn namespace_changed(i: &Intruder, namespace: &str) -> Change {
    changed_if(
        process::has_other_namespace(i.pid(), namespace),
        "the VMM is in another namespace",
    )
}

/// Whether a file system is mounted over the directory `public`. Unmounts it.
fn mounted(s: &Scene, _: &Intruder) -> Change {
    let done = nix::mount::umount(&s.path("public"));
    changed_if(done.is_ok(), "a file system was mounted there")
}
