//! The way back to what was given up: user, groups, capabilities, and the flags that guard them.

use nix::libc;

use super::{
    super::{
        intruder::{Intruder, Stop},
        process,
        scene::Scene,
    },
    Attempt, Change, Class, FILTER, USUAL, changed_if,
};

/// `_LINUX_CAPABILITY_VERSION_3` of capset(2).
const CAPABILITIES: i64 = 0x2008_0522;
/// Those of the first 32: CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, KILL, SETUID, SYS_PTRACE, SYS_ADMIN.
const WANTED: i64 = 1 | 1 << 1 | 1 << 2 | 1 << 5 | 1 << 7 | 1 << 19 | 1 << 21;

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "privilege-user",
        class: Class::Privileges,
        why: "Root again.",
        refusals: USUAL,
        act: |i, _| i.attempt("setresuid", libc::SYS_setresuid, &[0, 0, 0]),
        look: |_, i| is_root(i, "Uid"),
    },
    Attempt {
        name: "privilege-group",
        class: Class::Privileges,
        why: "Files of the group root.",
        refusals: USUAL,
        act: |i, _| i.attempt("setresgid", libc::SYS_setresgid, &[0, 0, 0]),
        look: |_, i| is_root(i, "Gid"),
    },
    Attempt {
        name: "privilege-more-groups",
        class: Class::Privileges,
        why: "The groups of disks and of KVM.",
        refusals: USUAL,
        act: |i, _| {
            let group = i.put(&6_u32.to_ne_bytes())?;
            i.attempt("setgroups", libc::SYS_setgroups, &[1, group])
        },
        look: |_, i| {
            let groups = process::status(i.pid(), "Groups");
            changed_if(groups.as_deref() == Some("6"), "it is in another group")
        },
    },
    Attempt {
        name: "privilege-capabilities",
        class: Class::Privileges,
        why: "Rights of root without its user.",
        refusals: USUAL,
        act: |i, _| {
            let header = i.put_words(&[CAPABILITIES])?;
            // Effective, permitted and inheritable, the lower halves first.
            let sets = i.put_words(&[WANTED << 32 | WANTED, 0, 0])?;
            i.attempt("capset", libc::SYS_capset, &[header, sets])
        },
        look: capable,
    },
    Attempt {
        name: "privilege-bounding-set",
        class: Class::Privileges,
        why: "An ambient capability survives the start of a program.",
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
                "it has ambient capabilities",
            )
        },
    },
    Attempt {
        name: "privilege-setuid-program",
        class: Class::Privileges,
        why: "A program that is started as root whoever starts it.",
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
        look: |_, i| match i.replaced {
            true => is_root(i, "Uid"),
            false => Ok(None),
        },
    },
    Attempt {
        name: "privilege-dumpable",
        class: Class::Privileges,
        why: "A dumpable process is open to others of its user, and /proc/self is its own.",
        refusals: FILTER,
        act: |i, _| {
            let arguments = [libc::PR_SET_DUMPABLE.into(), 1];
            i.attempt("prctl", libc::SYS_prctl, &arguments)
        },
        look: super::no_change,
    },
    Attempt {
        name: "privilege-keep-capabilities",
        class: Class::Privileges,
        why: "With it a change of user keeps capabilities.",
        refusals: FILTER,
        act: |i, _| {
            let arguments = [libc::PR_SET_KEEPCAPS.into(), 1];
            i.attempt("prctl", libc::SYS_prctl, &arguments)
        },
        look: super::no_change,
    },
];

const NONE: &str = "0000000000000000";

/// Whether the process that is there after the attempt has an effective id of root.
fn is_root(i: &Intruder, which: &str) -> Change {
    let ids = match process::is_alive(i.pid()) {
        true => process::status(i.pid(), which).unwrap_or_default(),
        false => String::new(),
    };
    changed_if(
        ids.split(' ').nth(1) == Some("0"),
        "its effective id is root's",
    )
}

fn capable(_: &Scene, i: &Intruder) -> Change {
    let effective = match process::is_alive(i.pid()) {
        true => process::status(i.pid(), "CapEff"),
        false => None,
    };
    changed_if(
        effective.is_some_and(|set| set != NONE),
        "it has capabilities",
    )
}
