//! The disk and the random generator of the host.

use std::{fs::File, io, io::Read, path::Path};

/// Random bytes from the kernel.
///
/// # Errors
/// Returns the errors of reading /dev/urandom.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Bytes of the file system at `dir` that are free for unprivileged processes. `None` if they cannot be read.
#[must_use]
pub fn disk_free(dir: &Path) -> Option<u64> {
    let stat = nix::sys::statvfs::statvfs(dir).ok()?;
    Some(stat.blocks_available().saturating_mul(stat.fragment_size()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_free_space_and_a_missing_directory_none() {
        assert!(disk_free(Path::new("/")).is_some());
        assert_eq!(disk_free(Path::new("/no/such/directory")), None);
    }
}
