//! Control groups: limits of memory, processes and CPU time are theirs.

use nix::libc;

use super::{super::process, Attempt, Class, USUAL, changed_if, staged};

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "group-leave",
        class: Class::Groups,
        why: "Outside of its group no limit holds.",
        refusals: USUAL,
        act: |i, s| {
            let pid = i.pid().to_string();
            i.overwrite(s.group.root_processes(), pid.as_bytes())
        },
        look: |s, i| {
            let inside = s.group.contains(i.pid())?;
            changed_if(
                !inside && process::is_alive(i.pid()),
                "it is out of its group",
            )
        },
    },
    Attempt {
        name: "group-raise-limit",
        class: Class::Groups,
        why: "A limit that it can raise is none.",
        refusals: USUAL,
        act: |i, s| i.overwrite(staged(s.group.limit())?, b"4000"),
        look: |s, _| changed_if(!s.group.is_limited()?, "the limit is another"),
    },
    Attempt {
        name: "group-make-inner",
        class: Class::Groups,
        why: "Groups are kernel memory.",
        refusals: USUAL,
        act: |i, s| {
            let path = i.path(&s.group.inner())?;
            i.attempt("mkdir", libc::SYS_mkdir, &[path, 0o755])
        },
        look: |s, _| changed_if(s.group.inner().exists(), "the group is there"),
    },
];
