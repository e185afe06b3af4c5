//! The VMM's own descriptors: passed on, opened again with more rights, duplicated, or their files enlarged.

use std::fs;

use model::template_file;
use nix::{errno::Errno, libc, sys::signal::Signal};

use super::attempt::{Attempt, Change, Class, FILTER, Refusal, USUAL, changed_if, no_change};
use crate::confinement::{
    intruder::{Intruder, Try},
    process,
    scene::Scene,
};

/// A descriptor number that no VMM needs.
const DESCRIPTOR: i64 = 8000;
/// A length greater than that of any layer.
const TIB: i64 = 1 << 40;
/// Resource numbers for prlimit64(2).
const RLIMIT_CORE: i64 = libc::RLIMIT_CORE as i64;
const RLIMIT_FSIZE: i64 = libc::RLIMIT_FSIZE as i64;

/// Refusals by the seccomp filter or by a resource limit.
const LIMITED: &[Refusal] = &[
    Refusal::Death(Signal::SIGSYS),
    Refusal::Error(Errno::EMFILE),
    Refusal::Error(Errno::EINVAL),
];
const TOO_LARGE: &[Refusal] = &[
    Refusal::Death(Signal::SIGSYS),
    Refusal::Death(Signal::SIGXFSZ),
    Refusal::Error(Errno::EFBIG),
];

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "descriptor-give-away",
        class: Class::Descriptors,
        why: "Another process could use the TAP or the KVM descriptors.",
        refusals: FILTER,
        act: give_away,
        look: no_change,
    },
    Attempt {
        name: "descriptor-image-for-writing",
        class: Class::Descriptors,
        why: "All clones read the root image, which the VMM has open only for reading. The attempt only opens it.",
        refusals: USUAL,
        act: |i, _| {
            let image = i.descriptor("the root image", |link| link.contains(".erofs"))?;
            i.open(format!("/proc/self/fd/{image}"), libc::O_RDWR)
                .map(|_| ())
        },
        look: no_change,
    },
    Attempt {
        name: "descriptor-console-again",
        class: Class::Descriptors,
        why: "A second open of the console file could use other flags.",
        refusals: USUAL,
        act: |i, _| {
            let console = i.descriptor("the console", is_console)?;
            i.open(format!("/proc/self/fd/{console}"), libc::O_RDWR)
                .map(|_| ())
        },
        look: no_change,
    },
    Attempt {
        name: "descriptor-lock-of-template",
        class: Class::Descriptors,
        why: "A lock on a file that all clones share can block other programs.",
        refusals: USUAL,
        act: |i, s| {
            let memory = s.template.join(template_file::MEMORY);
            let memory = memory.to_string_lossy().into_owned();
            let file = i.descriptor("the template's memory", |link| link == memory);
            let file = match file {
                Ok(file) => file,
                // The VMM has mapped the file and closed the descriptor.
                Err(_) => i.open(memory, libc::O_RDONLY)?,
            };
            i.attempt("flock", libc::SYS_flock, &[file, libc::LOCK_EX.into()])
        },
        look: no_change,
    },
    Attempt {
        name: "limit-descriptors",
        class: Class::Limits,
        why: "Open files take kernel memory, which a cgroup limits too late.",
        refusals: LIMITED,
        act: |i, _| i.fcntl(0, libc::F_DUPFD_CLOEXEC, DESCRIPTOR).map(|_| ()),
        look: |_, i| {
            let path = format!("/proc/{}/fd/{DESCRIPTOR}", i.pid());
            let open = fs::symlink_metadata(path).is_ok();
            changed_if(open, "the descriptor exists")
        },
    },
    Attempt {
        name: "limit-file-size",
        class: Class::Limits,
        why: "A file that grows without limit fills the host's disk.",
        refusals: TOO_LARGE,
        act: |i, _| {
            let console = i.descriptor("the console", is_console)?;
            i.attempt("ftruncate", libc::SYS_ftruncate, &[console, TIB])
        },
        look: no_change,
    },
    Attempt {
        name: "limit-raise-core",
        class: Class::Limits,
        why: "A core file would contain the guest's memory.",
        refusals: USUAL,
        act: |i, _| set_limit(i, RLIMIT_CORE, 1 << 20),
        look: |_, i| raised(i, "Max core file size", "1048576"),
    },
    Attempt {
        name: "limit-raise-file-size",
        class: Class::Limits,
        why: "A limit that the VMM can raise does not limit it.",
        refusals: USUAL,
        act: |i, _| set_limit(i, RLIMIT_FSIZE, 2 * TIB),
        look: |_, i| raised(i, "Max file size", "2199023255552"),
    },
];

/// Sends a descriptor with one byte of data (unix(7)): a `msghdr` with one SCM_RIGHTS `cmsghdr`.
fn give_away(i: &mut Intruder, _: &Scene) -> Try<()> {
    let (near, _) = i.socket_pair()?;
    let byte = i.put(b"x")?;
    let part = i.put_words(&[byte, 1])?;
    // A `cmsghdr`: length 20, level and type with 32 bits each, the descriptor, and padding.
    let kind = i64::from(libc::SCM_RIGHTS) << 32 | i64::from(libc::SOL_SOCKET);
    let rights = i.put_words(&[20, kind, near])?;
    let message = i.put_words(&[0, 0, part, 1, rights, 24, 0])?;
    i.attempt("sendmsg", libc::SYS_sendmsg, &[near, message, 0])
}

fn is_console(link: &str) -> bool {
    link.ends_with("/console.log")
}

fn set_limit(i: &mut Intruder, which: i64, value: i64) -> Try<()> {
    let both = i.put_words(&[value, value])?;
    let arguments = [0, which, both, 0];
    i.attempt("prlimit64", libc::SYS_prlimit64, &arguments)
}

fn raised(i: &Intruder, name: &str, value: &str) -> Change {
    if !process::is_alive(i.pid()) {
        return Ok(None);
    }
    let [soft, _] = process::limit(i.pid(), name)?;
    changed_if(soft == value, "the limit has changed")
}
