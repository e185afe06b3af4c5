//! Protects the server's memory, which contains values of secrets and tokens of sandboxes, from other processes and
//! from being written to disk.

use nix::{
    sys::{
        prctl,
        resource::{Resource, setrlimit},
    },
    unistd::geteuid,
};

/// Disables core dumps and, if the server runs as root, access by processes without CAP_SYS_PTRACE. Child processes
/// inherit the limit, but not the flag.
///
/// Does not restrict access if the server runs as another user: that user's processes can read the state files anyway,
/// so hiding the memory from them would protect nothing.
///
/// # Errors
/// Returns the kernel's error.
pub fn shield() -> nix::Result<()> {
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    if geteuid().is_root() {
        prctl::set_dumpable(false)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use nix::sys::resource::getrlimit;

    use super::*;

    #[test]
    fn a_shielded_process_dumps_no_core_and_is_not_dumpable() {
        shield().unwrap();
        assert_eq!(getrlimit(Resource::RLIMIT_CORE), Ok((0, 0)));
        assert_eq!(prctl::get_dumpable(), Ok(!geteuid().is_root()));
        // Files of /proc/self that the server reads.
        for file in ["stat", "mounts", "cgroup", "exe"] {
            let path = format!("/proc/self/{file}");
            assert!(std::fs::metadata(&path).is_ok(), "{path}");
        }
        assert!(std::fs::read_dir("/proc/self/fd").is_ok());
    }
}
