//! Keeps the memory of a server, which has values of secrets and tokens of sandboxes, from other processes and from disks.

use nix::{
    sys::{
        prctl,
        resource::{Resource, setrlimit},
    },
    unistd::geteuid,
};

/// Turns core dumps off, and for a server of root the access of processes without CAP_SYS_PTRACE. Child processes inherit
/// the limit, not the flag.
///
/// A server of another user stays as it is: that user's processes can read the files of its state, so hiding the memory
/// from them would protect nothing.
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
        // What the server reads of itself.
        for file in ["stat", "mounts", "cgroup", "exe"] {
            let path = format!("/proc/self/{file}");
            assert!(std::fs::metadata(&path).is_ok(), "{path}");
        }
        assert!(std::fs::read_dir("/proc/self/fd").is_ok());
    }
}
