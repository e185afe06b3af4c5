//! Cgroups, which limit memory, processes and CPU time.

use nix::libc;

use super::attempt::{Attempt, Class, USUAL, changed_if, staged};
use crate::confinement::process;

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "group-leave",
        class: Class::Groups,
        why: "The limits of a cgroup do not apply outside of it.",
        refusals: USUAL,
        act: |i, s| {
            let pid = i.pid().to_string();
            i.overwrite(s.group.root_processes(), pid.as_bytes())
        },
        look: |s, i| {
            let inside = s.group.contains(i.pid())?;
            changed_if(
                !inside && process::is_alive(i.pid()),
                "the VMM has left its cgroup",
            )
        },
    },
    Attempt {
        name: "group-raise-limit",
        class: Class::Groups,
        why: "A limit that the VMM can raise does not limit it.",
        refusals: USUAL,
        act: |i, s| i.overwrite(staged(s.group.limit())?, b"4000"),
        look: |s, _| changed_if(!s.group.is_limited()?, "the limit has changed"),
    },
    Attempt {
        name: "group-make-inner",
        class: Class::Groups,
        why: "Cgroups take kernel memory.",
        refusals: USUAL,
        act: |i, s| {
            let path = i.path(&s.group.inner())?;
            i.attempt("mkdir", libc::SYS_mkdir, &[path, 0o755])
        },
        look: |s, _| changed_if(s.group.inner().exists(), "the cgroup exists"),
    },
];
