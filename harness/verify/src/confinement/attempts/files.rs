//! Files, by path: files of root, files that any user may write, and the template that all clones share.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use model::template_file;
use nix::libc;

use super::attempt::{Attempt, Change, Class, USUAL, changed_if, no_change};
use crate::confinement::{
    calls::AT_CWD,
    intruder::{Intruder, Try},
    scene::Scene,
};

const DEFACED: &[u8] = b"defaced";

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "file-read-secret",
        class: Class::Files,
        why: "Keys and password hashes are in files that only root may read.",
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
        why: "A line added to such a file can create a user.",
        refusals: USUAL,
        act: |i, s| i.overwrite(s.path("secret"), DEFACED),
        look: |s, _| changed(s, "secret"),
    },
    Attempt {
        name: "file-of-the-host",
        class: Class::Files,
        why: "/etc/shadow or, if the host has none, the environment of process 1 is secret. The attempt only opens it.",
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
        why: "Files in directories such as /etc/cron.d are executed by root.",
        refusals: USUAL,
        act: |i, s| {
            let flags = libc::O_CREAT | libc::O_WRONLY;
            i.open(s.path("private/job"), flags).map(|_| ())
        },
        look: |s, _| exists(s, "private/job"),
    },
    Attempt {
        name: "file-create-in-public",
        class: Class::Files,
        why: "A file planted in a public directory can mislead other programs.",
        refusals: USUAL,
        act: |i, s| {
            let path = i.path(&s.path("public/planted"))?;
            let flags = i64::from(libc::O_CREAT | libc::O_WRONLY);
            i.attempt("open", libc::SYS_open, &[path, flags, 0o644])
        },
        look: |s, _| exists(s, "public/planted"),
    },
    Attempt {
        name: "file-write-everybodys",
        class: Class::Files,
        why: "The VMM must not change even a file that any user may write.",
        refusals: USUAL,
        act: |i, s| i.overwrite(s.path("writable"), DEFACED),
        look: |s, _| changed(s, "writable"),
    },
    Attempt {
        name: "file-remove",
        class: Class::Files,
        why: "Other users would lose their files in a public directory.",
        refusals: USUAL,
        act: |i, s| {
            let path = i.path(&s.path("public/doomed"))?;
            i.attempt("unlink", libc::SYS_unlink, &[path])
        },
        look: |s, _| changed_if(!s.path("public/doomed").exists(), "the file was removed"),
    },
    Attempt {
        name: "file-rename",
        class: Class::Files,
        why: "A renamed file can replace a file of another user.",
        refusals: USUAL,
        act: |i, s| {
            let from = i.path(&s.path("public/doomed"))?;
            let to = i.path(&s.path("public/renamed"))?;
            i.attempt("rename", libc::SYS_rename, &[from, to])
        },
        look: |s, _| exists(s, "public/renamed"),
    },
    Attempt {
        name: "file-hard-link",
        class: Class::Files,
        why: "A second name for a file can make another program disclose it.",
        refusals: USUAL,
        act: |i, s| {
            let from = i.path(&s.path("writable"))?;
            let to = i.path(&s.path("public/name"))?;
            let arguments = [AT_CWD, from, AT_CWD, to, 0];
            i.attempt("linkat", libc::SYS_linkat, &arguments)
        },
        look: |s, _| exists(s, "public/name"),
    },
    Attempt {
        name: "file-symbolic-link",
        class: Class::Files,
        why: "A program of root that follows the link writes to another file.",
        refusals: USUAL,
        act: |i, s| {
            let from = i.path(&s.path("secret"))?;
            let to = i.path(&s.path("public/lure"))?;
            i.attempt("symlink", libc::SYS_symlink, &[from, to])
        },
        look: |s, _| exists(s, "public/lure"),
    },
    Attempt {
        name: "file-make-readable",
        class: Class::Files,
        why: "Only the file mode protects the secret.",
        refusals: USUAL,
        act: |i, s| {
            let path = i.path(&s.path("secret"))?;
            i.attempt("chmod", libc::SYS_chmod, &[path, 0o666])
        },
        look: |s, _| {
            let mode = fs::metadata(s.path("secret"))?.permissions().mode();
            changed_if(mode & 0o77 != 0, "the mode has changed")
        },
    },
    Attempt {
        name: "file-truncate",
        class: Class::Files,
        why: "Truncating a file destroys its content.",
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
        why: "A file handle needs no path. Containers were escaped this way in 2014.",
        refusals: USUAL,
        act: by_handle,
        look: no_change,
    },
    Attempt {
        name: "file-by-32-bit-call",
        class: Class::Files,
        why: "32-bit system calls have other numbers, which a filter that checks only the number would confuse.",
        refusals: USUAL,
        act: |i, _| {
            // A 32-bit call takes 32-bit addresses, so the path must be below 4 GiB.
            let rights = i64::from(libc::PROT_READ | libc::PROT_WRITE);
            let flags = i64::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT);
            let low = i.call("mmap", libc::SYS_mmap, &[0, 4096, rights, flags, -1, 0])?;
            i.write_at(low.cast_unsigned(), b"/etc\0")?;
            // Number 5 is open in the 32-bit table (`asm/unistd_32.h`) and fstat in the 64-bit table.
            i.call_32("open", 5, &[low, libc::O_RDONLY.into(), 0])
                .map(|_| ())
        },
        look: no_change,
    },
    Attempt {
        name: "file-template-for-writing",
        class: Class::Files,
        why: "Every clone that starts later maps this file. The attempt only opens it.",
        refusals: USUAL,
        act: |i, s| {
            let memory = s.template.join(template_file::MEMORY);
            i.open(memory, libc::O_RDWR).map(|_| ())
        },
        look: no_change,
    },
];

/// Whether the content of a file of the scene has changed.
fn changed(scene: &Scene, name: &str) -> Change {
    let original = match name {
        "secret" => &scene.secret[..],
        _ => crate::confinement::scene::CONTENT,
    };
    let text = fs::read(scene.path(name))?;
    changed_if(text != original, "the file has changed")
}

fn exists(scene: &Scene, name: &str) -> Change {
    let found = scene.path(name).symlink_metadata().is_ok();
    changed_if(found, "the file exists")
}

/// Opens and reads the secret by a `struct file_handle` (name_to_handle_at(2)): a size, a type, and at most `BYTES`
/// bytes.
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
