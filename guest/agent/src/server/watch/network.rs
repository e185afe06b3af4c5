//! Network file systems, whose changes inotify does not see.

use std::path::Path;

use envd::ConnectError;
use nix::sys::statfs::{FUSE_SUPER_MAGIC, FsType, NFS_SUPER_MAGIC, SMB_SUPER_MAGIC, statfs};

use super::super::filesystem::failure::explain;

pub(super) fn is_on_network(path: &Path) -> Result<bool, ConnectError> {
    let found = statfs(path).map_err(|errno| explain(path, &errno.into()))?;
    Ok(is_network(found.filesystem_type()))
}

/// The types that envd refuses: NFS, three generations of SMB, FUSE (linux/magic.h).
fn is_network(kind: FsType) -> bool {
    const CIFS: FsType = FsType(0xff53_4d42);
    const SMB2: FsType = FsType(0xfe53_4d42);
    [
        NFS_SUPER_MAGIC,
        SMB_SUPER_MAGIC,
        CIFS,
        SMB2,
        FUSE_SUPER_MAGIC,
    ]
    .contains(&kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_recognised() {
        for magic in [0x6969, 0xff53_4d42, 0x517b, 0xfe53_4d42, 0x6573_5546] {
            assert!(is_network(FsType(magic)), "{magic:x}");
        }
        // ext4, overlay, tmpfs.
        for magic in [0xef53, 0x794c_7630, 0x0102_1994] {
            assert!(!is_network(FsType(magic)), "{magic:x}");
        }
    }
}
