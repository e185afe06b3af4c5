//! Executable memory with new code. Without it, an attacker has only the code in the VMM's text.

use nix::libc;

use super::attempt::{Attempt, Change, Class, FILTER, USUAL, changed_if};
use crate::confinement::{
    intruder::{Intruder, Stop, Try},
    scene::Scene,
};

const ALL: i64 = (libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC) as i64;
const READ_EXECUTE: i64 = (libc::PROT_READ | libc::PROT_EXEC) as i64;
/// From `linux/shm.h`.
const SHM_EXEC: i64 = 0o100_000;
/// From `linux/personality.h`.
const READ_IMPLIES_EXEC: i64 = 0x040_0000;
/// New code: four `ud2` instructions.
const NEW_CODE: [u8; 8] = [0x0f, 0x0b, 0x0f, 0x0b, 0x0f, 0x0b, 0x0f, 0x0b];

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "code-page-made-executable",
        class: Class::Code,
        why: "Data that the guest sent could become code.",
        refusals: FILTER,
        act: |i, _| {
            let page = i.page()?;
            let arguments = [page, 4096, READ_EXECUTE];
            i.attempt("mprotect", libc::SYS_mprotect, &arguments)
        },
        look: new_code,
    },
    Attempt {
        name: "code-new-page",
        class: Class::Code,
        why: "A page that is writable and executable takes any code.",
        refusals: FILTER,
        act: |i, _| {
            let flags = i64::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let arguments = [0, 4096, ALL, flags, -1, 0];
            i.attempt("mmap", libc::SYS_mmap, &arguments)
        },
        look: new_code,
    },
    Attempt {
        name: "code-mapped-file",
        class: Class::Code,
        why: "The guest's disk, mapped from its file, could become code.",
        refusals: FILTER,
        act: |i, _| {
            let layer = i.descriptor("the layer", |link| link.ends_with("/layer"))?;
            let flags = libc::MAP_PRIVATE.into();
            let arguments = [0, 4096, READ_EXECUTE, flags, layer, 0];
            i.attempt("mmap", libc::SYS_mmap, &arguments)
        },
        look: new_code,
    },
    Attempt {
        name: "code-page-with-key",
        class: Class::Code,
        why: "pkey_mprotect can make a page executable as mprotect can.",
        refusals: FILTER,
        act: |i, _| {
            let page = i.page()?;
            let arguments = [page, 4096, READ_EXECUTE, -1];
            i.attempt("pkey_mprotect", libc::SYS_pkey_mprotect, &arguments)
        },
        look: new_code,
    },
    Attempt {
        name: "code-shared-memory",
        class: Class::Code,
        why: "System V shared memory can be attached as executable.",
        refusals: FILTER,
        act: shared_memory,
        look: new_code,
    },
    Attempt {
        name: "code-by-personality",
        class: Class::Code,
        why: "With READ_IMPLIES_EXEC, the kernel makes every readable page executable.",
        refusals: FILTER,
        act: |i, _| {
            i.call("personality", libc::SYS_personality, &[READ_IMPLIES_EXEC])?;
            i.page().map(|_| ())
        },
        look: new_code,
    },
    Attempt {
        name: "code-own-text",
        class: Class::Code,
        why: "A write to /proc/self/mem changes even read-only text.",
        refusals: USUAL,
        act: |i, _| {
            let text = text_end(i)?;
            let file = i.open("/proc/self/mem", libc::O_RDWR)?;
            let bytes = i.put(&NEW_CODE)?;
            i.attempt("pwrite64", libc::SYS_pwrite64, &[file, bytes, 8, text])
        },
        look: |_, i| match text_end(i).and_then(|at| i.get(at, NEW_CODE.len())) {
            Ok(bytes) => changed_if(bytes == NEW_CODE, "the text has changed"),
            // The process has ended, so its memory is gone.
            Err(_) => Ok(None),
        },
    },
    Attempt {
        name: "code-memory-file",
        class: Class::Code,
        why: "A file in memory can be mapped as code or executed.",
        refusals: FILTER,
        act: |i, _| {
            let name = i.put(b"\0")?;
            i.attempt("memfd_create", libc::SYS_memfd_create, &[name, 0])
        },
        look: |_, i| {
            let found = i.descriptor("memory", |link| link.starts_with("/memfd:"));
            changed_if(found.is_ok(), "the memory file exists")
        },
    },
];

fn shared_memory(i: &mut Intruder, _: &Scene) -> Try<()> {
    let mode = i64::from(libc::IPC_CREAT) | 0o700;
    let segment = i.call("shmget", libc::SYS_shmget, &[0, 4096, mode])?;
    let attached = i.call("shmat", libc::SYS_shmat, &[segment, 0, SHM_EXEC]);
    // Removes the segment as soon as no process has it attached.
    let remove = [segment, libc::IPC_RMID.into(), 0];
    i.call("shmctl", libc::SYS_shmctl, &remove)?;
    attached.map(|_| ())
}

/// Address of the last eight bytes of the program's text.
fn text_end(i: &Intruder) -> Try<i64> {
    let all = i.mappings()?;
    let text = all.iter().find(|mapping| mapping.is_text());
    let text = text.ok_or_else(|| Stop::Broken("the VMM has no text".to_owned()))?;
    Ok((text.range.end - 8).cast_signed())
}

/// Looks for executable memory other than the program's text, its libraries and the kernel's pages.
fn new_code(_: &Scene, i: &Intruder) -> Change {
    let Ok(all) = i.mappings() else {
        // The process has ended, so its memory is gone.
        return Ok(None);
    };
    let own = std::fs::read_link(format!("/proc/{}/exe", i.pid())).unwrap_or_default();
    let known = |name: &str| {
        let kernels = name == "[vdso]" || name == "[vsyscall]";
        kernels || own.as_os_str() == name || name.contains("/lib/")
    };
    let new = all.iter().find(|m| m.is_executable() && !known(&m.name));
    Ok(new.map(|mapping| format!("executable memory {:?} {}", mapping.name, mapping.rights)))
}
