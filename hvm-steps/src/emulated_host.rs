//! PID 1 of the emulated host: what its kernel needs before VMs can run, and the end.

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
    sys::reboot::{RebootMode, reboot},
};

use crate::steps::Places;

/// The disk with the guest's files.
const DISK: &str = "/dev/vda";
const GUEST: &str = "/guest";
const WORK: &str = "/work";
/// The disk that outlives this host, and where it is mounted.
const KEPT_DISK: &str = "/dev/vdb";
const KEPT: &str = "/kept";

/// Prepares, runs the steps, says how it went and powers off. The last line is what `xtask` looks for.
pub(crate) fn serve(run: impl FnOnce(&Places) -> Result<()>) -> ! {
    let done = prepare().and_then(|()| {
        run(&Places {
            vmm: "/cube-vmm".into(),
            guest: GUEST.into(),
            work: WORK.into(),
            only: option("hvm_steps.only"),
            kept: Some(KEPT.into()),
            lacking: option("hvm_steps.lacking"),
        })
    });
    // What is on the disk shall be there for the next host.
    let done = done.and_then(|()| Ok(umount(KEPT)?));
    match done {
        Ok(()) => println!("hvm-steps: passed"),
        Err(error) => println!("hvm-steps: failed: {error:#}"),
    }
    let gone: Result<Infallible, Errno> = reboot(RebootMode::RB_POWER_OFF);
    // A kernel whose first process ends says so and stops: the console shows it.
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
        // The VMM keeps what guests write there.
        ("tmpfs", "/var/tmp"),
    ] {
        mount_at(fstype, target, fstype, MsFlags::empty(), "")?;
    }
    let order = fs::read_to_string("/modules/order").context("cannot read /modules/order")?;
    for name in order.lines() {
        let file = File::open(Path::new("/modules").join(name))?;
        finit_module(&file, &CString::default(), ModuleInitFlags::empty())
            .with_context(|| format!("cannot load {name}"))?;
    }
    wait_for(Path::new(DISK))?;
    mount_at(DISK, GUEST, "ext4", MsFlags::MS_RDONLY, "noload")?;
    wait_for(Path::new(KEPT_DISK))?;
    mount_at(KEPT_DISK, KEPT, "ext4", MsFlags::empty(), "")?;
    println!("prepared in {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
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

/// `name=value` of the kernel's command line.
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
