//! What it has open: given away, opened again with more rights, multiplied, enlarged.

use std::fs;

use model::template_file;
use nix::{errno::Errno, libc, sys::signal::Signal};

use super::{
    super::{
        intruder::{Intruder, Try},
        process,
        scene::Scene,
    },
    Attempt, Class, FILTER, Refusal, USUAL, changed_if, no_change,
};

/// More than a VMM has use for.
const DESCRIPTOR: i64 = 8000;
/// Longer than any layer.
const TIB: i64 = 1 << 40;
/// Numbers of limits as prlimit64(2) takes them.
const RLIMIT_CORE: i64 = libc::RLIMIT_CORE as i64;
const RLIMIT_FSIZE: i64 = libc::RLIMIT_FSIZE as i64;

/// A limit's own answers, beside the filter's.
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
        why: "The TAP or KVM in the hands of another process.",
        refusals: FILTER,
        act: give_away,
        look: no_change,
    },
    Attempt {
        name: "descriptor-image-for-writing",
        class: Class::Descriptors,
        why: "All clones read the root image; it was opened for reading. Opened and no more.",
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
        why: "A second description of its console's file, with flags of its choice.",
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
        why: "A lease on a shared file stops every other program that opens it.",
        refusals: USUAL,
        act: |i, s| {
            let memory = s.template.join(template_file::MEMORY);
            let memory = memory.to_string_lossy().into_owned();
            let file = i.descriptor("the template's memory", |link| link == memory);
            let file = match file {
                Ok(file) => file,
                // It is mapped, and closed.
                Err(_) => i.open(memory, libc::O_RDONLY)?,
            };
            i.attempt("flock", libc::SYS_flock, &[file, libc::LOCK_EX.into()])
        },
        look: no_change,
    },
    Attempt {
        name: "limit-descriptors",
        class: Class::Limits,
        why: "Open files are kernel memory that no group's limit stops in time.",
        refusals: LIMITED,
        act: |i, _| i.fcntl(0, libc::F_DUPFD_CLOEXEC, DESCRIPTOR).map(|_| ()),
        look: |_, i| {
            let path = format!("/proc/{}/fd/{DESCRIPTOR}", i.pid());
            let open = fs::symlink_metadata(path).is_ok();
            changed_if(open, "the descriptor is there")
        },
    },
    Attempt {
        name: "limit-file-size",
        class: Class::Limits,
        why: "A file that grows without end fills the host's disk.",
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
        why: "A core file has the guest's memory in it.",
        refusals: USUAL,
        act: |i, _| set_limit(i, RLIMIT_CORE, 1 << 20),
        look: |_, i| raised(i, "Max core file size", "1048576"),
    },
    Attempt {
        name: "limit-raise-file-size",
        class: Class::Limits,
        why: "A limit that it can raise is none.",
        refusals: USUAL,
        act: |i, _| set_limit(i, RLIMIT_FSIZE, 2 * TIB),
        look: |_, i| raised(i, "Max file size", "2199023255552"),
    },
];

/// One descriptor beside one byte, as unix(7) has it: a `msghdr` with one `cmsghdr` of SCM_RIGHTS.
fn give_away(i: &mut Intruder, _: &Scene) -> Try<()> {
    let (near, _) = i.socket_pair()?;
    let byte = i.put(b"x")?;
    let part = i.put_words(&[byte, 1])?;
    // Its length of 20 bytes, level and type of 32 bits each, the descriptor and what pads it.
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

fn raised(i: &Intruder, name: &str, value: &str) -> super::Change {
    if !process::is_alive(i.pid()) {
        return Ok(None);
    }
    let [soft, _] = process::limit(i.pid(), name)?;
    changed_if(soft == value, "the limit is another")
}
