//! Privileges that the VMM has given up: user, groups, capabilities, and the flags that protect them.

use nix::libc;

use super::attempt::{Attempt, Change, Class, FILTER, USUAL, changed_if, no_change};
use crate::confinement::{
    intruder::{Intruder, Stop},
    process,
    scene::Scene,
};

/// `_LINUX_CAPABILITY_VERSION_3` of capset(2).
const CAPABILITIES: i64 = 0x2008_0522;
/// Some of the capabilities 0 to 31: CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, KILL, SETUID, SYS_PTRACE, SYS_ADMIN.
const WANTED: i64 = 1 | 1 << 1 | 1 << 2 | 1 << 5 | 1 << 7 | 1 << 19 | 1 << 21;

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "privilege-user",
        class: Class::Privileges,
        why: "As root, the VMM could do anything on the host.",
        refusals: USUAL,
        act: |i, _| i.attempt("setresuid", libc::SYS_setresuid, &[0, 0, 0]),
        look: |_, i| is_root(i, "Uid"),
    },
    Attempt {
        name: "privilege-group",
        class: Class::Privileges,
        why: "The group root has access to many files.",
        refusals: USUAL,
        act: |i, _| i.attempt("setresgid", libc::SYS_setresgid, &[0, 0, 0]),
        look: |_, i| is_root(i, "Gid"),
    },
    Attempt {
        name: "privilege-more-groups",
        class: Class::Privileges,
        why: "Groups give access to disks and KVM.",
        refusals: USUAL,
        act: |i, _| {
            let group = i.put(&6_u32.to_ne_bytes())?;
            i.attempt("setgroups", libc::SYS_setgroups, &[1, group])
        },
        look: |_, i| {
            let groups = process::status(i.pid(), "Groups");
            changed_if(
                groups.as_deref() == Some("6"),
                "the VMM is in another group",
            )
        },
    },
    Attempt {
        name: "privilege-capabilities",
        class: Class::Privileges,
        why: "Capabilities give rights of root to another user.",
        refusals: USUAL,
        act: |i, _| {
            let header = i.put_words(&[CAPABILITIES])?;
            // The lower halves of the effective, permitted and inheritable sets, then the upper halves.
            let sets = i.put_words(&[WANTED << 32 | WANTED, 0, 0])?;
            i.attempt("capset", libc::SYS_capset, &[header, sets])
        },
        look: capable,
    },
    Attempt {
        name: "privilege-bounding-set",
        class: Class::Privileges,
        why: "An ambient capability survives an execve.",
        refusals: USUAL,
        act: |i, _| {
            let header = i.put_words(&[CAPABILITIES])?;
            let inheritable = i.put_words(&[WANTED << 32 | WANTED, WANTED, 0])?;
            i.call("capset", libc::SYS_capset, &[header, inheritable])?;
            let arguments = [
                libc::PR_CAP_AMBIENT.into(),
                libc::PR_CAP_AMBIENT_RAISE.into(),
                21,
            ];
            i.attempt("prctl", libc::SYS_prctl, &arguments)
        },
        look: |_, i| {
            let ambient = process::status(i.pid(), "CapAmb");
            changed_if(
                ambient.is_some_and(|set| set != NONE),
                "the VMM has ambient capabilities",
            )
        },
    },
    Attempt {
        name: "privilege-setuid-program",
        class: Class::Privileges,
        why: "A setuid program runs as root, whoever starts it.",
        refusals: USUAL,
        act: |i, s| {
            let path = i.path(&s.path("setuid"))?;
            i.call("execve", libc::SYS_execve, &[path, 0, 0])?;
            let user = process::status(i.pid(), "Uid").unwrap_or_default();
            match user.split(' ').nth(1) {
                Some("0") => Ok(()),
                _ => Err(Stop::Refused("execve as root", nix::errno::Errno::EPERM)),
            }
        },
        look: |_, i| {
            if i.replaced {
                is_root(i, "Uid")
            } else {
                Ok(None)
            }
        },
    },
    Attempt {
        name: "privilege-dumpable",
        class: Class::Privileges,
        why: "Other processes of the same user can access a dumpable process, which also owns its files in /proc.",
        refusals: FILTER,
        act: |i, _| {
            let arguments = [libc::PR_SET_DUMPABLE.into(), 1];
            i.attempt("prctl", libc::SYS_prctl, &arguments)
        },
        look: no_change,
    },
    Attempt {
        name: "privilege-keep-capabilities",
        class: Class::Privileges,
        why: "With PR_SET_KEEPCAPS, a change of user keeps capabilities.",
        refusals: FILTER,
        act: |i, _| {
            let arguments = [libc::PR_SET_KEEPCAPS.into(), 1];
            i.attempt("prctl", libc::SYS_prctl, &arguments)
        },
        look: no_change,
    },
];

const NONE: &str = "0000000000000000";

/// Whether the effective user or group id is 0 after the attempt.
fn is_root(i: &Intruder, which: &str) -> Change {
    let ids = if process::is_alive(i.pid()) {
        process::status(i.pid(), which).unwrap_or_default()
    } else {
        String::new()
    };
    changed_if(ids.split(' ').nth(1) == Some("0"), "the effective id is 0")
}

fn capable(_: &Scene, i: &Intruder) -> Change {
    let effective = if process::is_alive(i.pid()) {
        process::status(i.pid(), "CapEff")
    } else {
        None
    };
    changed_if(
        effective.is_some_and(|set| set != NONE),
        "the VMM has capabilities",
    )
}
