//! Requirements on the host, checked before anything on it is changed. A host that does not meet them is refused with
//! exit code 6 and a message that says how to fix it.

use std::{fs, io, path::Path};

use anyhow::{Context, Result};
use model::Bytes;

/// Disk space that a build from scratch takes, cargo's outputs included.
const BUILD_SPACE: Bytes = Bytes::mib(4096);

/// A requirement that this host does not meet.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unsuitable {
    #[error(
        "this host is not Debian (ID={0:?} in /etc/os-release): the guest kernel and the images are built from \
         Debian's archive through apt; run this command on Debian 12 or newer"
    )]
    NotDebian(String),
    #[error(
        "the CPU architecture is {0}: guests are x86-64 machines; run this command on an x86-64 host"
    )]
    Architecture(&'static str),
    #[error(
        "not running as root: installing packages, building images and opening /dev/kvm need root; \
         run the same command as root (sudo -E env \"PATH=$PATH\" cargo xtask …)"
    )]
    NotRoot,
    #[error(
        "/dev/kvm not found: virtual machines need KVM; load the module (modprobe kvm_intel or kvm_amd), enable \
         virtualization in the firmware, or pass the device to this container (--device /dev/kvm). \
         Tests that run without KVM: cargo xtask test --tier unit"
    )]
    NoKvm,
    #[error(
        "cannot open /dev/kvm: run as root or as a member of the group kvm, and allow the device in a container's \
         cgroup. Tests that run without KVM: cargo xtask test --tier unit"
    )]
    KvmClosed(#[source] io::Error),
    #[error(
        "not enough disk space at {at}: {free} free, {BUILD_SPACE} needed; free some space or \
         clone the repository onto a larger disk"
    )]
    Disk { free: String, at: String },
    #[error(
        "cannot reach the package archive {uri} to fetch {what}: check the network, apt's sources and its proxy \
         settings until `apt-get update` works"
    )]
    Archive { uri: String, what: String },
}

/// Checks that the host runs Debian on x86-64 and that this process is root.
pub(crate) fn check_system() -> Result<()> {
    if std::env::consts::ARCH != "x86_64" {
        return Err(Unsuitable::Architecture(std::env::consts::ARCH).into());
    }
    let id = os_release("ID").unwrap_or_default();
    if id != "debian" {
        return Err(Unsuitable::NotDebian(id).into());
    }
    if !nix::unistd::geteuid().is_root() {
        return Err(Unsuitable::NotRoot.into());
    }
    Ok(())
}

/// Checks that /dev/kvm can be opened.
pub(crate) fn check_kvm() -> Result<(), Unsuitable> {
    let kvm = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm");
    match kvm {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Unsuitable::NoKvm),
        Err(error) => Err(Unsuitable::KvmClosed(error)),
    }
}

/// Checks that the file system of `dir` has enough free space. `dir` need not exist yet.
pub(crate) fn check_disk(dir: &Path) -> Result<()> {
    let at = dir.ancestors().find(|d| d.exists()).unwrap_or(dir);
    let stat = nix::sys::statvfs::statvfs(at)
        .with_context(|| format!("cannot read the free disk space at {}", at.display()))?;
    let free = stat.blocks_available().saturating_mul(stat.fragment_size());
    if free < BUILD_SPACE.0 {
        return Err(Unsuitable::Disk {
            free: format!("{} MiB", free >> 20),
            at: at.display().to_string(),
        }
        .into());
    }
    Ok(())
}

/// The code name of the Debian release, for example "bookworm".
pub(crate) fn codename() -> Result<String> {
    os_release("VERSION_CODENAME").context("/etc/os-release has no VERSION_CODENAME")
}

fn os_release(key: &str) -> Option<String> {
    let text = fs::read_to_string("/etc/os-release").ok()?;
    field(&text, key)
}

fn field(text: &str, key: &str) -> Option<String> {
    let line = |line: &str| line.strip_prefix(key)?.strip_prefix('=').map(str::to_owned);
    let value = text.lines().find_map(line)?;
    Some(value.trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    #[test]
    fn os_release_fields_are_parsed() {
        let text = "PRETTY_NAME=\"Debian\"\nID_LIKE=x\nID=debian\nVERSION_CODENAME=\"bookworm\"\n";
        assert_eq!(super::field(text, "ID").as_deref(), Some("debian"));
        let codename = super::field(text, "VERSION_CODENAME");
        assert_eq!(codename.as_deref(), Some("bookworm"));
        assert_eq!(super::field(text, "VERSION"), None);
    }
}
