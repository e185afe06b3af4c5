//! The root file system: read-only image below, writable layer above.

use std::{
    os::fd::OwnedFd,
    path::Path,
    time::{Duration, Instant},
};

use nix::{
    dir::{Dir, Type},
    fcntl::{AtFlags, OFlag, open, openat},
    mount::{MntFlags, MsFlags, umount2},
    sys::stat::{Mode, fstat, fstatat},
    unistd::{UnlinkatFlags, chdir, chroot, unlinkat},
};

use super::{
    BootError, cannot,
    system::{make_dir, mount},
};

/// How long drivers may take to find their devices. They do it while their module loads as a rule.
const DEVICE_PATIENCE: Duration = Duration::from_secs(10);
const LOWER: &str = "/lower";
const LAYER: &str = "/layer";
const NEW_ROOT: &str = "/newroot";

/// Mounts image and layer on each other; the layer's directory.
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
    // What is deleted goes back to the host at once: a guest that trims from time to time is never idle.
    mount(
        &layer.to_string_lossy(),
        LAYER,
        "ext4",
        MsFlags::MS_NOATIME,
        "discard",
    )?;
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
    let flags = OFlag::O_DIRECTORY | OFlag::O_RDONLY | OFlag::O_CLOEXEC;
    let opened = open(LAYER, flags, Mode::empty()).map_err(cannot("open the layer"))?;
    // The overlay holds both by itself. Detached, nothing in the guest can change them under it.
    for dir in [LOWER, LAYER] {
        umount2(dir, MntFlags::MNT_DETACH).map_err(cannot(format!("detach {dir}")))?;
    }
    Ok(opened)
}

/// Makes the new root the root of everything and gives the initramfs's memory back.
///
/// The overlay is *moved* to `/` rather than entered by chroot alone: inside a mere chroot the kernel
/// refuses user namespaces. This program's own file is deleted too; its pages live as long as it runs.
pub(super) fn switch() -> Result<(), BootError> {
    for dir in ["/proc", "/sys", "/dev"] {
        // Mounted afresh in the new root.
        umount2(dir, MntFlags::MNT_DETACH).map_err(cannot(format!("detach {dir}")))?;
    }
    let flags = OFlag::O_DIRECTORY | OFlag::O_RDONLY | OFlag::O_CLOEXEC;
    let old = Dir::open("/", flags, Mode::empty()).map_err(cannot("open the initramfs"))?;
    chdir(NEW_ROOT).map_err(cannot("enter the new root"))?;
    mount(".", "/", "", MsFlags::MS_MOVE, "")?;
    chroot(".").map_err(cannot("change the root"))?;
    chdir("/").map_err(cannot("enter the root"))?;
    let device = fstat(&old).map_err(cannot("look at the initramfs"))?.st_dev;
    empty(old, device);
    Ok(())
}

/// Deletes everything below a directory that is on the given device. What cannot be deleted only costs
/// memory, so nothing is reported.
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

/// Waits until a block device is there and can be opened.
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
