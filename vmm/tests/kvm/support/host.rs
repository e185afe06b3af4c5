//! The capabilities of this host, and the prepared files.

use std::{env, fs::File, path::PathBuf};

use model::GuestPaths;

/// The requirement of a test that this host lacks; `None` if the test can run.
pub(crate) fn lack(test: &str) -> Option<String> {
    if let Err(e) = File::options().read(true).write(true).open("/dev/kvm") {
        return Some(format!("cannot open /dev/kvm: {e}"));
    }
    if env::var_os("CUBE_ARTIFACTS").is_none() {
        return Some("CUBE_ARTIFACTS is not set (run `cargo xtask test`)".into());
    }
    let kernel = guest().kernel;
    if !kernel.exists() {
        return Some(format!("{} is missing", kernel.display()));
    }
    if !program().exists() {
        return Some(format!("{} is missing", program().display()));
    }
    if NEED_NEWER_KERNEL.contains(&test) && !newer_guest().kernel.exists() {
        let kernel = newer_guest().kernel;
        let cure = "`cargo xtask hvm --newer-kernel` fetches it";
        return Some(format!("{} is missing: {cure}", kernel.display()));
    }
    let root = nix::unistd::geteuid().is_root();
    if !root && (test.starts_with("net_") || NEED_ROOT.contains(&test)) {
        return Some("this test needs root".into());
    }
    None
}

/// Tests that need root, because they mount a file system.
const NEED_ROOT: [&str; 1] = ["kvm_a_full_disk_stops_a_snapshot"];

/// Tests that boot [`newer_guest`].
const NEED_NEWER_KERNEL: [&str; 1] = ["kvm_a_newer_guest_kernel_boots_and_its_clone_runs"];

fn artifacts() -> PathBuf {
    PathBuf::from(env::var_os("CUBE_ARTIFACTS").unwrap_or_default())
}

/// Test suites and tools that `cargo xtask soak` fetches.
pub(crate) fn suites() -> PathBuf {
    artifacts().join("soak")
}

/// The program under test.
pub(crate) fn program() -> PathBuf {
    match env::var_os("CUBE_BIN") {
        Some(dir) => PathBuf::from(dir).join("cube-vmm"),
        None => PathBuf::from(env!("CARGO_BIN_EXE_cube-vmm")),
    }
}

/// The files that a guest boots from.
pub(crate) fn guest() -> GuestPaths {
    guest_in("guest")
}

/// Those of a guest whose kernel is from Debian's backports.
pub(crate) fn newer_guest() -> GuestPaths {
    guest_in("guest-backports")
}

fn guest_in(dir: &str) -> GuestPaths {
    let guest = artifacts().join(dir);
    GuestPaths {
        kernel: guest.join("vmlinux"),
        initrd: guest.join("initramfs.cpio"),
        root: guest.join("base.erofs"),
        layer: guest.join("layer.ext4"),
    }
}

/// The template of `cargo xtask prepare`. Returns `None` unless it was made with the program under test, of which it
/// keeps a copy.
pub(crate) fn prepared_template() -> Option<PathBuf> {
    let dir = artifacts().join("templates/base");
    let contents = |path: PathBuf| std::fs::read(path).ok();
    (contents(program())? == contents(dir.join("cube-vmm"))?).then_some(dir)
}

/// MemAvailable in bytes; zero if it cannot be read.
pub(crate) fn free_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib: u64 = line
        .and_then(|l| l.trim().strip_suffix(" kB")?.parse().ok())
        .unwrap_or(0);
    kib << 10
}

/// Bytes from the host's random generator.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    use std::io::Read;
    let mut bytes = [0; N];
    File::open("/dev/urandom")
        .and_then(|mut f| f.read_exact(&mut bytes))
        .expect("/dev/urandom");
    bytes
}
