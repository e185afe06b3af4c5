//! KVM, the TAP, and devices that are opened or made.

use std::{fs::File, os::unix::fs::FileTypeExt};

use nix::libc;

use super::{
    super::intruder::{Intruder, Try},
    Attempt, Class, FILTER, USUAL, changed_if, no_change,
};

/// From `linux/kvm.h`.
const KVM_CREATE_VM: u64 = 0xae01;
/// From `linux/if_tun.h`.
const TUNSETPERSIST: u64 = 0x4004_54cb;
const TUNSETVNETHDRSZ: u64 = 0x4004_54d8;
const TUNSETOWNER: u64 = 0x4004_54cc;

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "device-kvm",
        class: Class::Devices,
        why: "A machine of its own, without limits of memory.",
        refusals: USUAL,
        act: |i, _| {
            let kvm = i.open("/dev/kvm", libc::O_RDWR)?;
            i.ioctl(kvm, KVM_CREATE_VM, 0).map(|_| ())
        },
        look: no_change,
    },
    Attempt {
        name: "device-tun",
        class: Class::Devices,
        why: "An interface of its own in the host's network.",
        refusals: USUAL,
        act: |i, _| i.open("/dev/net/tun", libc::O_RDWR).map(|_| ()),
        look: no_change,
    },
    Attempt {
        name: "device-tap-stays",
        class: Class::Devices,
        why: "A TAP that outlives its sandbox.",
        refusals: FILTER,
        act: |i, _| tap(i, TUNSETPERSIST, 1),
        look: no_change,
    },
    Attempt {
        name: "device-tap-header",
        class: Class::Devices,
        why: "The next VM on this TAP reads frames at the wrong place.",
        refusals: FILTER,
        act: |i, _| {
            let size = i.put(&20_u32.to_ne_bytes())?;
            tap(i, TUNSETVNETHDRSZ, size)
        },
        look: no_change,
    },
    Attempt {
        name: "device-tap-owner",
        class: Class::Devices,
        why: "Another user may open it from then on.",
        refusals: FILTER,
        act: |i, _| tap(i, TUNSETOWNER, 65_534),
        look: no_change,
    },
    Attempt {
        name: "device-make-node",
        class: Class::Devices,
        why: "Any device, at a path that is its own.",
        refusals: USUAL,
        act: |i, s| {
            let path = i.path(&s.path("public/node"))?;
            let mode = i64::from(libc::S_IFCHR) | 0o666;
            // Major 1, minor 1: the host's memory.
            i.attempt("mknod", libc::SYS_mknod, &[path, mode, 0x101])
        },
        look: |s, _| {
            let node = s.path("public/node").symlink_metadata();
            let made = node.is_ok_and(|node| node.file_type().is_char_device());
            changed_if(made, "the node is there")
        },
    },
    Attempt {
        name: "device-disk",
        class: Class::Devices,
        why: "A disk of the host, below all files. Opened and no more.",
        refusals: USUAL,
        act: |i, _| {
            // The first one that root may open.
            let disks = ["/dev/vda", "/dev/sda", "/dev/nvme0n1", "/dev/loop0"];
            let found = disks.into_iter().find(|path| File::open(path).is_ok());
            i.open(found.unwrap_or_default(), libc::O_RDONLY)
                .map(|_| ())
        },
        look: no_change,
    },
];

fn tap(i: &mut Intruder, request: u64, argument: i64) -> Try<()> {
    let tap = i.descriptor("a TAP", |link| link == "/dev/net/tun")?;
    i.ioctl(tap, request, argument).map(|_| ())
}
