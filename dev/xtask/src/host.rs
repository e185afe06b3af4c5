//! What a host must have before anything is changed on it. Every refusal names its cure and ends the
//! program with exit code 6.

use std::{fs, io, path::Path};

use anyhow::{Context, Result};
use model::Bytes;

/// Room that a build from nothing takes, cargo's outputs included.
const ROOM_TO_BUILD: Bytes = Bytes::mib(4096);

/// Why this host will not do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unsuitable {
    #[error(
        "this is not Debian (ID={0:?} in /etc/os-release): the kernel and the images come from \
         Debian's archive through apt; run it on Debian 12 or newer"
    )]
    NotDebian(String),
    #[error("this host's processor is {0}: guests are x86-64 machines; run it on an x86-64 host")]
    Architecture(&'static str),
    #[error(
        "not root: installing packages, building images and opening /dev/kvm need it; \
         run the same command as root (sudo -E env \"PATH=$PATH\" cargo xtask …)"
    )]
    NotRoot,
    #[error(
        "no /dev/kvm: virtual machines need KVM; load it (modprobe kvm_intel or kvm_amd), enable \
         virtualization in the firmware, or hand the device to this container (--device /dev/kvm). \
         Tests that need none: cargo xtask test --tier unit"
    )]
    NoKvm,
    #[error(
        "/dev/kvm cannot be opened: let this user read and write it (root, or the group kvm), and in \
         a container allow the device. Tests that need none: cargo xtask test --tier unit"
    )]
    KvmClosed(#[source] io::Error),
    #[error(
        "too little disk: {free} are free at {at}, {ROOM_TO_BUILD} are needed; free some room or \
         clone the repository onto a larger disk"
    )]
    Disk { free: String, at: String },
    #[error(
        "the package archive {uri} cannot be reached, and {what} must come from it; check the network, \
         apt's sources and its proxy settings, until `apt-get update` works"
    )]
    Archive { uri: String, what: String },
}

/// Root, Debian, x86-64.
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

/// /dev/kvm opens.
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

/// Room below `dir`, which need not exist yet.
pub(crate) fn check_disk(dir: &Path) -> Result<()> {
    let at = dir.ancestors().find(|d| d.exists()).unwrap_or(dir);
    let stat = nix::sys::statvfs::statvfs(at)
        .with_context(|| format!("cannot tell the free room at {}", at.display()))?;
    let free = stat.blocks_available().saturating_mul(stat.fragment_size());
    if free < ROOM_TO_BUILD.0 {
        return Err(Unsuitable::Disk {
            free: format!("{} MiB", free >> 20),
            at: at.display().to_string(),
        }
        .into());
    }
    Ok(())
}

/// The release's name, for example "bookworm".
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
    fn os_release_is_read() {
        let text = "PRETTY_NAME=\"Debian\"\nID_LIKE=x\nID=debian\nVERSION_CODENAME=\"bookworm\"\n";
        assert_eq!(super::field(text, "ID").as_deref(), Some("debian"));
        let codename = super::field(text, "VERSION_CODENAME");
        assert_eq!(codename.as_deref(), Some("bookworm"));
        assert_eq!(super::field(text, "VERSION"), None);
    }
}
