//! Files by their paths: the host's, everybody's, and the template that all clones share.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use model::template_file;
use nix::libc;

use super::{
    super::{
        calls::AT_CWD,
        intruder::{Intruder, Try},
        scene::Scene,
    },
    Attempt, Change, Class, USUAL, changed_if, no_change,
};

const DEFACED: &[u8] = b"defaced";

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "file-read-secret",
        class: Class::Files,
        why: "Keys and password hashes are such files of root's.",
        refusals: USUAL,
        act: |i, s| {
            let file = i.open(s.path("secret"), libc::O_RDONLY)?;
            i.read_secret(file, 0, &s.secret)
        },
        look: no_change,
    },
    Attempt {
        name: "file-write-secret",
        class: Class::Files,
        why: "A line written there adds a user.",
        refusals: USUAL,
        act: |i, s| i.overwrite(s.path("secret"), DEFACED),
        look: |s, _| changed(s, "secret"),
    },
    Attempt {
        name: "file-of-the-host",
        class: Class::Files,
        why: "/etc/shadow, or where there is none the environment of the first process. Opened and no more.",
        refusals: USUAL,
        act: |i, _| {
            let paths = ["/etc/shadow", "/proc/1/environ"];
            let file = paths.into_iter().find(|path| Path::new(path).exists());
            i.open(file.unwrap_or_default(), libc::O_RDONLY).map(|_| ())
        },
        look: no_change,
    },
    Attempt {
        name: "file-create-among-roots",
        class: Class::Files,
        why: "A file in a directory such as /etc/cron.d is run as root.",
        refusals: USUAL,
        act: |i, s| {
            let flags = libc::O_CREAT | libc::O_WRONLY;
            i.open(s.path("private/job"), flags).map(|_| ())
        },
        look: |s, _| there_is(s, "private/job"),
    },
    Attempt {
        name: "file-create-in-public",
        class: Class::Files,
        why: "What others take from a public directory may be planted there.",
        refusals: USUAL,
        act: |i, s| {
            let path = i.path(&s.path("public/planted"))?;
            let flags = i64::from(libc::O_CREAT | libc::O_WRONLY);
            i.attempt("open", libc::SYS_open, &[path, flags, 0o644])
        },
        look: |s, _| there_is(s, "public/planted"),
    },
    Attempt {
        name: "file-write-everybodys",
        class: Class::Files,
        why: "A file that any user may write is not the VMM's either.",
        refusals: USUAL,
        act: |i, s| i.overwrite(s.path("writable"), DEFACED),
        look: |s, _| changed(s, "writable"),
    },
    Attempt {
        name: "file-remove",
        class: Class::Files,
        why: "Others lose what they keep in a public directory.",
        refusals: USUAL,
        act: |i, s| {
            let path = i.path(&s.path("public/doomed"))?;
            i.attempt("unlink", libc::SYS_unlink, &[path])
        },
        look: |s, _| changed_if(!s.path("public/doomed").exists(), "the file is gone"),
    },
    Attempt {
        name: "file-rename",
        class: Class::Files,
        why: "A file of the same name takes the place of another's.",
        refusals: USUAL,
        act: |i, s| {
            let from = i.path(&s.path("public/doomed"))?;
            let to = i.path(&s.path("public/renamed"))?;
            i.attempt("rename", libc::SYS_rename, &[from, to])
        },
        look: |s, _| there_is(s, "public/renamed"),
    },
    Attempt {
        name: "file-hard-link",
        class: Class::Files,
        why: "A second name of a secret is where another program may give it away.",
        refusals: USUAL,
        act: |i, s| {
            let from = i.path(&s.path("writable"))?;
            let to = i.path(&s.path("public/name"))?;
            let arguments = [AT_CWD, from, AT_CWD, to, 0];
            i.attempt("linkat", libc::SYS_linkat, &arguments)
        },
        look: |s, _| there_is(s, "public/name"),
    },
    Attempt {
        name: "file-symbolic-link",
        class: Class::Files,
        why: "A program of root's that follows it writes elsewhere.",
        refusals: USUAL,
        act: |i, s| {
            let from = i.path(&s.path("secret"))?;
            let to = i.path(&s.path("public/lure"))?;
            i.attempt("symlink", libc::SYS_symlink, &[from, to])
        },
        look: |s, _| there_is(s, "public/lure"),
    },
    Attempt {
        name: "file-make-readable",
        class: Class::Files,
        why: "The mode guards the secret.",
        refusals: USUAL,
        act: |i, s| {
            let path = i.path(&s.path("secret"))?;
            i.attempt("chmod", libc::SYS_chmod, &[path, 0o666])
        },
        look: |s, _| {
            let mode = fs::metadata(s.path("secret"))?.permissions().mode();
            changed_if(mode & 0o77 != 0, "the mode is another")
        },
    },
    Attempt {
        name: "file-truncate",
        class: Class::Files,
        why: "An empty file serves as well as a removed one.",
        refusals: USUAL,
        act: |i, s| {
            let path = i.path(&s.path("writable"))?;
            i.attempt("truncate", libc::SYS_truncate, &[path, 0])
        },
        look: |s, _| changed(s, "writable"),
    },
    Attempt {
        name: "file-by-handle",
        class: Class::Files,
        why: "A handle needs no path: a way out of containers in 2014.",
        refusals: USUAL,
        act: by_handle,
        look: no_change,
    },
    Attempt {
        name: "file-by-32-bit-call",
        class: Class::Files,
        why: "Numbers of 32-bit calls mean other calls: a filter that compares numbers alone is passed.",
        refusals: USUAL,
        act: |i, _| {
            // The path has to be below 4 GiB.
            let rights = i64::from(libc::PROT_READ | libc::PROT_WRITE);
            let flags = i64::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT);
            let low = i.call("mmap", libc::SYS_mmap, &[0, 4096, rights, flags, -1, 0])?;
            i.write_at(low.cast_unsigned(), b"/etc\0")?;
            // 5 is open there (`asm/unistd_32.h`), and fstat here.
            i.call_32("open", 5, &[low, libc::O_RDONLY.into(), 0])
                .map(|_| ())
        },
        look: no_change,
    },
    Attempt {
        name: "file-template-for-writing",
        class: Class::Files,
        why: "Every clone that starts from now on maps it. Opened and no more.",
        refusals: USUAL,
        act: |i, s| {
            let memory = s.template.join(template_file::MEMORY);
            i.open(memory, libc::O_RDWR).map(|_| ())
        },
        look: no_change,
    },
];

/// Whether a file of the scene holds what was written.
fn changed(scene: &Scene, name: &str) -> Change {
    let first = match name {
        "secret" => &scene.secret[..],
        _ => super::super::scene::CONTENT,
    };
    let text = fs::read(scene.path(name))?;
    changed_if(text != first, "the file has other bytes")
}

fn there_is(scene: &Scene, name: &str) -> Change {
    let found = scene.path(name).symlink_metadata().is_ok();
    changed_if(found, "the file is there")
}

/// `struct file_handle` of name_to_handle_at(2): its size, its type, and as many bytes at most.
fn by_handle(i: &mut Intruder, s: &Scene) -> Try<()> {
    const BYTES: u8 = 128;
    let mut empty = vec![0; 8 + usize::from(BYTES)];
    empty[0] = BYTES;
    let path = i.path(&s.path("secret"))?;
    let handle = i.put(&empty)?;
    let mount = i.room(8)?;
    let arguments = [AT_CWD, path, handle, mount, 0];
    let number = libc::SYS_name_to_handle_at;
    i.call("name_to_handle_at", number, &arguments)?;
    let place = i.open(s.path("."), libc::O_RDONLY | libc::O_DIRECTORY)?;
    let arguments = [place, handle, libc::O_RDONLY.into()];
    let number = libc::SYS_open_by_handle_at;
    let file = i.call("open_by_handle_at", number, &arguments)?;
    i.read_secret(file, 0, &s.secret)
}
