//! Settings below /proc and /sys. Attempts only open settings of the whole host for writing.

use std::fs;

use nix::libc;

use super::attempt::{Attempt, Change, Class, USUAL, changed_if, no_change, staged};
use crate::confinement::process;

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "settings-core-pattern",
        class: Class::Settings,
        why: "The kernel runs the program that this file names as root.",
        refusals: USUAL,
        act: |i, _| {
            let path = "/proc/sys/kernel/core_pattern";
            i.open(path, libc::O_WRONLY).map(|_| ())
        },
        look: no_change,
    },
    Attempt {
        name: "settings-sysrq",
        class: Class::Settings,
        why: "A single letter written to sysrq-trigger can crash the host. Without this file, the next panic can do it.",
        refusals: USUAL,
        act: |i, _| {
            let paths = ["/proc/sysrq-trigger", "/proc/sys/kernel/panic"];
            i.open(first_existing(&paths), libc::O_WRONLY).map(|_| ())
        },
        look: no_change,
    },
    Attempt {
        name: "settings-sys",
        class: Class::Settings,
        why: "Files below /sys control devices and memory management.",
        refusals: USUAL,
        act: |i, _| {
            let paths = [
                "/sys/kernel/mm/ksm/run",
                "/sys/kernel/profiling",
                "/sys/power/state",
            ];
            i.open(first_existing(&paths), libc::O_WRONLY).map(|_| ())
        },
        look: no_change,
    },
    Attempt {
        name: "settings-own-oom-score",
        class: Class::Settings,
        why: "If the kernel kills this VMM last, it kills others first.",
        refusals: USUAL,
        act: |i, _| i.overwrite("/proc/self/oom_score_adj", b"997"),
        look: |_, i| oom_score_is(i.pid(), "997"),
    },
    Attempt {
        name: "settings-neighbours-oom-score",
        class: Class::Settings,
        why: "The kernel would kill the other sandbox first.",
        refusals: USUAL,
        act: |i, s| {
            let pid = staged(s.victim())?.clone.pid();
            i.overwrite(format!("/proc/{pid}/oom_score_adj"), b"998")
        },
        look: |s, _| oom_score_is(s.victim()?.clone.pid(), "998"),
    },
    Attempt {
        name: "settings-roots-environment",
        class: Class::Settings,
        why: "Programs receive keys in their environment.",
        refusals: USUAL,
        act: |i, s| {
            let root = staged(s.root())?;
            let file = i.open(format!("/proc/{}/environ", root.pid()), libc::O_RDONLY)?;
            i.read_secret(file, root.secret_in_environ(), &s.secret)
        },
        look: no_change,
    },
];

/// The first of these paths that exists, or an empty path.
fn first_existing(paths: &[&'static str]) -> &'static str {
    let found = paths.iter().find(|path| fs::exists(path).unwrap_or(false));
    found.copied().unwrap_or_default()
}

fn oom_score_is(pid: u32, wanted: &str) -> Change {
    if !process::is_alive(pid) {
        return Ok(None);
    }
    let score = fs::read_to_string(format!("/proc/{pid}/oom_score_adj"))?;
    changed_if(score.trim() == wanted, "the score has changed")
}
