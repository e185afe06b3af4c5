//! PID 1 of the emulated host: mounts file systems, loads kernel modules, runs the steps, powers off.

use std::{
    convert::Infallible,
    ffi::CString,
    fs::{self, File},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    errno::Errno,
    kmod::{ModuleInitFlags, finit_module},
    mount::{MsFlags, mount, umount},
    sys::{
        reboot::{RebootMode, reboot},
        resource::{Resource, setrlimit},
    },
};

use crate::config::Config;

/// The disk with the files that guests boot from.
const DISK: &str = "/dev/vda";
const GUEST: &str = "/guest";
const WORK: &str = "/work";
/// Limit of open files while the steps run.
const DESCRIPTORS: u64 = 1 << 20;
/// The disk that both emulated hosts mount.
const KEPT_DISK: &str = "/dev/vdb";
const KEPT: &str = "/kept";

/// Sets the host up, calls `run`, prints the result and powers off. `xtask` reads the result from the last line
/// printed.
pub(crate) fn serve(run: impl FnOnce(&Config) -> Result<()>) -> ! {
    let done = prepare().and_then(|()| {
        run(&Config {
            vmm: "/cube-vmm".into(),
            bench: "/cube-bench".into(),
            guest: GUEST.into(),
            work: WORK.into(),
            only: option("hvm_steps.only"),
            cases: option("hvm_steps.confinement").map(|names| words(&names)),
            kept: Some(KEPT.into()),
            lacking: option("hvm_steps.lacking"),
        })
    });
    // Unmounting writes everything to the disk for the second host.
    let done = done.and_then(|()| Ok(umount(KEPT)?));
    match done {
        Ok(()) => println!("hvm-steps: passed"),
        Err(error) => println!("hvm-steps: failed: {error:#}"),
    }
    let gone: Result<Infallible, Errno> = reboot(RebootMode::RB_POWER_OFF);
    // If PID 1 exits, the kernel panics: the console shows that the power-off failed.
    std::process::exit(gone.map_or(1, |never| match never {}))
}

fn prepare() -> Result<()> {
    let start = Instant::now();
    for (fstype, target) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", WORK),
        ("tmpfs", "/tmp"),
        // In /var/tmp, the VMM keeps the files of guests' writable layers.
        ("tmpfs", "/var/tmp"),
        // The prover puts VMMs into cgroups.
        ("cgroup2", "/sys/fs/cgroup"),
    ] {
        mount_at(fstype, target, fstype, MsFlags::empty(), "")?;
    }
    let order = fs::read_to_string("/modules/order").context("cannot read /modules/order")?;
    for name in order.lines() {
        let file = File::open(Path::new("/modules").join(name))?;
        finit_module(&file, &CString::default(), ModuleInitFlags::empty())
            .with_context(|| format!("cannot load {name}"))?;
    }
    raise_limit()?;
    wait_for(Path::new(DISK))?;
    // Mounted writable, so that nothing but the confinement keeps VMMs from writing to it. The emulator discards all
    // writes.
    mount_at(DISK, GUEST, "ext4", MsFlags::empty(), "")?;
    wait_for(Path::new(KEPT_DISK))?;
    mount_at(KEPT_DISK, KEPT, "ext4", MsFlags::empty(), "")?;
    println!("prepared in {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Raises the limit of open files above the limit that a VMM has, as on other hosts. The kernel's default for PID 1 is
/// so low that it, and not the confinement, would stop some of the prover's attempts.
fn raise_limit() -> Result<()> {
    setrlimit(Resource::RLIMIT_NOFILE, DESCRIPTORS, DESCRIPTORS)
        .context("cannot raise the limit of open files")
}

fn mount_at(source: &str, target: &str, fstype: &str, flags: MsFlags, options: &str) -> Result<()> {
    fs::create_dir_all(target)?;
    let options = Some(options).filter(|o| !o.is_empty());
    mount(Some(source), target, Some(fstype), flags, options)
        .with_context(|| format!("cannot mount {target}"))
}

fn wait_for(device: &Path) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !device.exists() {
        ensure!(
            Instant::now() < deadline,
            "{} did not appear",
            device.display()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Splits a text at commas. Empty words are dropped.
fn words(text: &str) -> Vec<String> {
    let words = text.split(',').filter(|word| !word.is_empty());
    words.map(str::to_owned).collect()
}

/// The value of `name=value` on the kernel's command line.
fn option(name: &str) -> Option<String> {
    let line = fs::read_to_string("/proc/cmdline").ok()?;
    let mut words = line.split_whitespace();
    let value = |word: &str| {
        word.strip_prefix(name)?
            .strip_prefix('=')
            .map(str::to_owned)
    };
    words.find_map(value)
}
