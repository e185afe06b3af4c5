//! KVM, the TAP, and other devices.

use std::{fs::File, os::unix::fs::FileTypeExt};

use nix::libc;

use super::attempt::{Attempt, Class, FILTER, USUAL, changed_if, no_change};
use crate::confinement::intruder::{Intruder, Try};

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
        why: "A second VM would have no memory limit.",
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
        why: "A new interface would be in the host's network.",
        refusals: USUAL,
        act: |i, _| i.open("/dev/net/tun", libc::O_RDWR).map(|_| ()),
        look: no_change,
    },
    Attempt {
        name: "device-tap-stays",
        class: Class::Devices,
        why: "A persistent TAP outlives its sandbox.",
        refusals: FILTER,
        act: |i, _| tap(i, TUNSETPERSIST, 1),
        look: no_change,
    },
    Attempt {
        name: "device-tap-header",
        class: Class::Devices,
        why: "The next VM on this TAP would read frames at a wrong offset.",
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
        why: "Another user could then open the TAP.",
        refusals: FILTER,
        act: |i, _| tap(i, TUNSETOWNER, 65_534),
        look: no_change,
    },
    Attempt {
        name: "device-make-node",
        class: Class::Devices,
        why: "A new device node gives access to any device.",
        refusals: USUAL,
        act: |i, s| {
            let path = i.path(&s.path("public/node"))?;
            let mode = i64::from(libc::S_IFCHR) | 0o666;
            // Major 1, minor 1 is /dev/mem.
            i.attempt("mknod", libc::SYS_mknod, &[path, mode, 0x101])
        },
        look: |s, _| {
            let node = s.path("public/node").symlink_metadata();
            let made = node.is_ok_and(|node| node.file_type().is_char_device());
            changed_if(made, "the node exists")
        },
    },
    Attempt {
        name: "device-disk",
        class: Class::Devices,
        why: "A disk of the host contains all its files. The attempt only opens it.",
        refusals: USUAL,
        act: |i, _| {
            // The first disk that exists and that root may open.
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
