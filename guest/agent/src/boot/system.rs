//! The setup that is the same with and without an initramfs: kernel file systems, standard streams, signals, loopback,
//! and the files that hold a clone's identity.

use std::{
    fs::{self, OpenOptions, Permissions},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{PermissionsExt, symlink},
    },
    path::Path,
};

use nix::{
    errno::Errno,
    mount::MsFlags,
    sys::{
        reboot::set_cad_enabled,
        socket::{AddressFamily, SockFlag, SockType, socket},
    },
    unistd::{dup2_stderr, dup2_stdin, dup2_stdout, sethostname},
};

use super::{BootError, cannot};
use crate::{
    identity::{Machine, MachineFiles},
    sys,
};

/// The directory of the identity files. It is on a tmpfs, so that writing a new identity copies no file up into the
/// layer.
const IDENTITY: &str = "/run/cube";
/// The host name until the first `/init`.
const FIRST_HOSTNAME: &str = "cube";

/// Calls mount(2). Empty `fstype` and `options` are passed as null.
pub(super) fn mount(
    source: &str,
    target: &str,
    fstype: &str,
    flags: MsFlags,
    options: &str,
) -> Result<(), BootError> {
    let type_name = (!fstype.is_empty()).then_some(fstype);
    let data = (!options.is_empty()).then_some(options);
    nix::mount::mount(Some(source), target, type_name, flags, data).map_err(|errno| {
        BootError::Mount {
            source_name: source.to_owned(),
            fstype: fstype.to_owned(),
            target: target.into(),
            source: errno,
        }
    })
}

/// Mounts a kernel file system. Creates the directory if it is missing. An existing mount there (`EBUSY`) is not an
/// error.
fn mount_kernel(
    fstype: &str,
    target: &str,
    flags: MsFlags,
    options: &str,
) -> Result<(), BootError> {
    make_dir(target)?;
    match mount(fstype, target, fstype, flags, options) {
        Err(BootError::Mount {
            source: Errno::EBUSY,
            ..
        }) => Ok(()),
        other => other,
    }
}

const QUIET: MsFlags = MsFlags::MS_NOSUID
    .union(MsFlags::MS_NODEV)
    .union(MsFlags::MS_NOEXEC);

/// Mounts the file systems that are needed to load modules and find devices.
pub(super) fn mount_early() -> Result<(), BootError> {
    mount_kernel("proc", "/proc", QUIET, "")?;
    mount_kernel("sysfs", "/sys", QUIET, "")?;
    mount_kernel("devtmpfs", "/dev", MsFlags::MS_NOSUID, "mode=0755")
}

/// Sets how many bytes of a file a page fault maps. The setting is only in debugfs. If this fails, the kernel's default
/// stays.
pub(super) fn set_fault_around(bytes: &str) {
    const DEBUGFS: &str = "/sys/kernel/debug";
    let file = Path::new(DEBUGFS).join("fault_around_bytes");
    let set = mount_kernel("debugfs", DEBUGFS, QUIET, "")
        .and_then(|()| fs::write(file, bytes).map_err(cannot("set fault_around_bytes")));
    if let Err(error) = set {
        eprintln!("{}", model::chain(&error));
    }
    let _best_effort = nix::mount::umount(DEBUGFS);
}

/// Mounts all kernel file systems in the final root, and creates the usual links in /dev and the directory /run/lock.
pub(super) fn mount_all() -> Result<(), BootError> {
    let nosuid = MsFlags::MS_NOSUID;
    let memory = nosuid | MsFlags::MS_NODEV;
    mount_early()?;
    mount_kernel("cgroup2", "/sys/fs/cgroup", QUIET, "nsdelegate")?;
    let pts = nosuid | MsFlags::MS_NOEXEC;
    mount_kernel("devpts", "/dev/pts", pts, "gid=5,mode=0620,ptmxmode=0666")?;
    mount_kernel("tmpfs", "/dev/shm", memory, "mode=1777")?;
    mount_kernel("tmpfs", "/run", memory, "mode=0755")?;
    for (name, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        match symlink(target, name) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(cannot(format!("create {name}"))(error));
            }
            Ok(()) | Err(_) => {}
        }
    }
    make_dir("/run/lock")?;
    let sticky = Permissions::from_mode(0o1777);
    fs::set_permissions("/run/lock", sticky)
        .map_err(cannot("make /run/lock writable for all users"))
}

/// Connects the standard streams to the console, or to /dev/null if there is none. Without a console the kernel starts
/// PID 1 with no open descriptors, and the first pipes that the agent opens must not get the numbers 0, 1 and 2.
pub(super) fn open_console() {
    let open = |path| OpenOptions::new().read(true).write(true).open(path);
    let Ok(stream) = open("/dev/console").or_else(|_| open("/dev/null")) else {
        return;
    };
    // Only errors are written to these streams, and a failure here could not be reported.
    let _ = dup2_stdin(&stream)
        .and_then(|()| dup2_stdout(&stream))
        .and_then(|()| dup2_stderr(&stream));
}

/// Makes Ctrl-Alt-Del send SIGINT to PID 1 instead of resetting the machine.
pub(super) fn set_signals() -> Result<(), BootError> {
    set_cad_enabled(false).map_err(cannot("take over ctrl-alt-del"))
}

/// Sets the loopback interface up (127.0.0.1 and ::1).
pub(super) fn loopback_up() -> Result<(), BootError> {
    let socket = socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )
    .map_err(cannot("create a socket"))?;
    sys::interface_up(socket.as_fd(), c"lo").map_err(cannot("set the loopback interface up"))
}

/// Creates the identity files and mounts them where programs look for them.
pub(super) fn machine(layer: Option<OwnedFd>) -> Result<Machine, BootError> {
    make_dir(IDENTITY)?;
    sethostname(FIRST_HOSTNAME).map_err(cannot("set the host name"))?;
    let hosts = fs::read_to_string("/etc/hosts").unwrap_or_default();
    let files = MachineFiles {
        machine_id: identity_file("machine-id", "/etc/machine-id", "")?,
        boot_id: identity_file("boot-id", "/proc/sys/kernel/random/boot_id", &boot_id()?)?,
        hosts: identity_file("hosts", "/etc/hosts", &hosts)?,
        envs: environment_file()?,
        random: open_for_writing("/dev/urandom")?,
    };
    // The kernel's own host name file is mounted over /etc/hostname, so a new name needs no write there.
    bind("/proc/sys/kernel/hostname", "/etc/hostname")?;
    Ok(Machine::new(files, layer, Path::new(IDENTITY)))
}

fn boot_id() -> Result<String, BootError> {
    let path = "/proc/sys/kernel/random/boot_id";
    fs::read_to_string(path).map_err(cannot(format!("read {path}")))
}

/// Creates a file in memory, mounts it over `target` and keeps it open for writing.
fn identity_file(name: &str, target: &str, content: &str) -> Result<fs::File, BootError> {
    let path = format!("{IDENTITY}/{name}");
    fs::write(&path, content).map_err(cannot(format!("write {path}")))?;
    bind(&path, target)?;
    open_for_writing(&path)
}

/// Creates the file that holds the sandbox's environment. Only root may read it: values may be secrets.
fn environment_file() -> Result<fs::File, BootError> {
    let path = format!("{IDENTITY}/envs");
    fs::write(&path, "").map_err(cannot(format!("write {path}")))?;
    let private = Permissions::from_mode(0o600);
    fs::set_permissions(&path, private).map_err(cannot(format!("protect {path}")))?;
    open_for_writing(&path)
}

fn open_for_writing(path: &str) -> Result<fs::File, BootError> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.map_err(cannot(format!("open {path}")))
}

/// Mounts one file over another, which is created if it is missing.
fn bind(source: &str, target: &str) -> Result<(), BootError> {
    if !Path::new(target).exists() {
        fs::write(target, "").map_err(cannot(format!("create {target}")))?;
    }
    mount(source, target, "", MsFlags::MS_BIND, "")
}

pub(super) fn make_dir(path: &str) -> Result<(), BootError> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(cannot(format!("create the directory {path}"))(error))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}
