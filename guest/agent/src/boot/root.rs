//! The root file system: read-only image below, writable layer above.

use std::{
    fs::File,
    io::{self, Seek, SeekFrom},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::Path,
    time::{Duration, Instant},
};

use nix::{
    dir::{Dir, Type},
    errno::Errno,
    fcntl::{AtFlags, OFlag, open, openat},
    mount::{MntFlags, MsFlags, umount2},
    sys::stat::{Mode, fstat, fstatat},
    unistd::{UnlinkatFlags, chdir, chroot, unlinkat},
};

use super::{
    BootError, cannot,
    system::{make_dir, mount},
};
use crate::{console, sys};

/// How long a block device may take to appear after its driver was loaded. Usually the device already exists.
const DEVICE_PATIENCE: Duration = Duration::from_secs(10);
const LOWER: &str = "/lower";
const LAYER: &str = "/layer";
const NEW_ROOT: &str = "/newroot";
/// Deleted blocks are discarded at once, because a periodic trim would keep an idle guest busy. No thread writes
/// zeros to inode tables.
const OPTIONS: &str = "discard,noinit_itable";
/// Bytes of a block of the layer.
const BLOCK: u64 = 4096;
const DIRECTORY: OFlag = OFlag::O_DIRECTORY
    .union(OFlag::O_RDONLY)
    .union(OFlag::O_CLOEXEC);

/// Mounts the image and the layer, and their overlay on [`NEW_ROOT`]. Returns the layer's open directory.
pub(super) fn assemble(image: &Path, layer: &Path) -> Result<OwnedFd, BootError> {
    for device in [image, layer] {
        wait_for(device)?;
    }
    for dir in [LOWER, LAYER, NEW_ROOT] {
        make_dir(dir)?;
    }
    mount(
        &image.to_string_lossy(),
        LOWER,
        "erofs",
        MsFlags::MS_RDONLY,
        "",
    )?;
    mount(
        &layer.to_string_lossy(),
        LAYER,
        "ext4",
        MsFlags::MS_NOATIME,
        OPTIONS,
    )?;
    if let Err(why) = grow(layer) {
        console::fail(&format!("cannot grow the writable layer: {why}"));
    }
    let (upper, work) = (format!("{LAYER}/upper"), format!("{LAYER}/work"));
    make_dir(&upper)?;
    make_dir(&work)?;
    let options = format!("lowerdir={LOWER},upperdir={upper},workdir={work}");
    mount(
        "overlay",
        NEW_ROOT,
        "overlay",
        MsFlags::MS_NOATIME,
        &options,
    )?;
    let opened = open(LAYER, DIRECTORY, Mode::empty()).map_err(cannot("open the layer"))?;
    // The overlay keeps both file systems alive. Once they are detached, no program can change them underneath it.
    for dir in [LOWER, LAYER] {
        umount2(dir, MntFlags::MNT_DETACH).map_err(cannot(format!("detach {dir}")))?;
    }
    Ok(opened)
}

/// Grows the layer's file system to its whole device, which the host may have enlarged.
fn grow(device: &Path) -> io::Result<()> {
    let mut device = File::open(device)?;
    let blocks = device.seek(SeekFrom::End(0))? / BLOCK;
    let mut superblock = [0; 1024];
    device.read_exact_at(&mut superblock, 1024)?;
    if blocks <= block_count(&superblock) {
        return Ok(());
    }
    let dir = open(LAYER, DIRECTORY, Mode::empty())?;
    // Otherwise, the kernel would write zeros to the new inode tables, which are holes in the host's file.
    remount("init_itable")?;
    let grown = sys::resize(dir.as_fd(), blocks);
    remount(OPTIONS)?;
    Ok(grown?)
}

/// `s_blocks_count_lo` and `s_blocks_count_hi` of an ext4 superblock.
fn block_count(superblock: &[u8; 1024]) -> u64 {
    let word = |at: usize| {
        superblock[at..]
            .first_chunk()
            .map_or(0, |b| u32::from_le_bytes(*b))
    };
    u64::from(word(0x150)) << 32 | u64::from(word(0x4))
}

fn remount(options: &str) -> Result<(), Errno> {
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_NOATIME;
    nix::mount::mount(None::<&str>, LAYER, None::<&str>, flags, Some(options))
}

/// Moves the new root to `/` and frees the initramfs's memory.
///
/// The overlay is *moved* to `/` before chroot(2): the kernel does not let a process create user namespaces if its root
/// differs from that of its mount namespace. This program's own file is deleted too; its pages stay until it ends.
pub(super) fn switch() -> Result<(), BootError> {
    for dir in ["/proc", "/sys", "/dev"] {
        // Mounted again in the new root.
        umount2(dir, MntFlags::MNT_DETACH).map_err(cannot(format!("detach {dir}")))?;
    }
    let old = Dir::open("/", DIRECTORY, Mode::empty()).map_err(cannot("open the initramfs"))?;
    chdir(NEW_ROOT).map_err(cannot("enter the new root"))?;
    mount(".", "/", "", MsFlags::MS_MOVE, "")?;
    chroot(".").map_err(cannot("change the root"))?;
    chdir("/").map_err(cannot("enter the root"))?;
    let device = fstat(&old).map_err(cannot("stat the initramfs"))?.st_dev;
    empty(old, device);
    Ok(())
}

/// Deletes everything in a directory, recursively, except entries that are on another device than `device`. Failures
/// are ignored: a file that remains only costs memory.
fn empty(mut dir: Dir, device: u64) {
    let mut names = Vec::new();
    for entry in dir.iter().filter_map(Result::ok) {
        let name = entry.file_name().to_owned();
        if !matches!(name.to_bytes(), b"." | b"..") {
            names.push((name, entry.file_type() == Some(Type::Directory)));
        }
    }
    for (name, is_dir) in names {
        let here = fstatat(&dir, name.as_c_str(), AtFlags::AT_SYMLINK_NOFOLLOW);
        if here.is_ok_and(|stat| stat.st_dev != device) {
            continue;
        }
        let mut how = UnlinkatFlags::NoRemoveDir;
        if is_dir {
            how = UnlinkatFlags::RemoveDir;
            let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            if let Ok(fd) = openat(&dir, name.as_c_str(), flags, Mode::empty())
                && let Ok(below) = Dir::from_fd(fd)
            {
                empty(below, device);
            }
        }
        let _ = unlinkat(&dir, name.as_c_str(), how);
    }
}

/// Waits until a block device exists.
fn wait_for(device: &Path) -> Result<(), BootError> {
    let deadline = Instant::now() + DEVICE_PATIENCE;
    while !device.exists() {
        if Instant::now() >= deadline {
            return Err(BootError::NoDevice {
                device: device.to_owned(),
                within: DEVICE_PATIENCE,
            });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_block_count_of_a_superblock_has_64_bits() {
        let mut superblock = [0xff; 1024];
        superblock[0x4..0x8].copy_from_slice(&5_u32.to_le_bytes());
        superblock[0x150..0x154].copy_from_slice(&2_u32.to_le_bytes());
        assert_eq!(block_count(&superblock), (2 << 32) + 5);
    }
}
