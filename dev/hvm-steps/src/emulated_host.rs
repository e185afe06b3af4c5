//! PID 1 of the emulated host: mounts file systems, loads kernel modules, runs the steps, powers off.

use std::{
    convert::Infallible,
    ffi::CString,
    fs::{self, File},
    io,
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
        termios::tcdrain,
    },
};

use crate::config::Config;

/// The disk with the files that guests boot from, in QEMU and in Bochs.
const DISK: [&str; 2] = ["/dev/vda", "/dev/sda"];
const GUEST: &str = "/guest";
const WORK: &str = "/work";
/// Limit of open files while the steps run.
const DESCRIPTORS: u64 = 1 << 20;
/// The disk that all emulated hosts mount.
const KEPT_DISK: [&str; 2] = ["/dev/vdb", "/dev/sdb"];
const KEPT: &str = "/kept";

/// Sets the host up, calls `run`, prints the result and powers off. `xtask` reads the result from the last line
/// printed.
pub(crate) fn serve(run: impl FnOnce(&Config) -> Result<()>) -> ! {
    let done = prepare().and_then(|()| {
        run(&Config {
            vmm: "/cube-vmm".into(),
            verify: "/cube-verify".into(),
            guest: GUEST.into(),
            work: WORK.into(),
            only: option("hvm_steps.only"),
            cases: option("hvm_steps.confinement").map(|names| words(&names)),
            brief: option("hvm_steps.brief").is_some(),
            skip: list("hvm_steps.skip"),
            kept: Some(KEPT.into()),
            keep: option("hvm_steps.keep"),
            templates: list("hvm_steps.templates"),
        })
    });
    // Unmounting writes everything to the disk for the second host.
    let done = done.and_then(|()| Ok(umount(KEPT)?));
    match done {
        Ok(()) => println!("hvm-steps: passed"),
        Err(error) => println!("hvm-steps: failed: {error:#}"),
    }
    // A serial line at its real speed has not sent everything yet. If this fails, xtask reports that the result is
    // missing.
    let _ = tcdrain(io::stdout());
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
        ("debugfs", "/sys/kernel/debug"),
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
        let parameters = parameters(name);
        finit_module(
            &file,
            &CString::new(parameters.clone())?,
            ModuleInitFlags::empty(),
        )
        .with_context(|| format!("cannot load {name} {parameters}"))?;
        check_switches(&module_name(name), &parameters)?;
    }
    raise_limit()?;
    // Mounted writable, so that only the confinement keeps VMMs from writing to it. The emulator discards all
    // writes.
    mount_at(wait_for(DISK)?, GUEST, "ext4", MsFlags::empty(), "")?;
    mount_at(wait_for(KEPT_DISK)?, KEPT, "ext4", MsFlags::empty(), "")?;
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

/// Waits until one of the devices exists.
fn wait_for(devices: [&'static str; 2]) -> Result<&'static str> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(device) = devices.into_iter().find(|d| Path::new(d).exists()) {
            return Ok(device);
        }
        ensure!(Instant::now() < deadline, "none of {devices:?} appeared");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The parameters of a module on the kernel's command line, where they have the form `module.parameter=value`.
fn parameters(file: &str) -> String {
    let name = module_name(file);
    let line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let own = |word: &str| Some(word.strip_prefix(&name)?.strip_prefix('.')?.to_owned());
    let own: Vec<String> = line.split_whitespace().filter_map(own).collect();
    own.join(" ")
}

fn module_name(file: &str) -> String {
    file.split('.').next().unwrap_or(file).replace('-', "_")
}

/// Checks that the switches in `parameters` are off: the kernel ignores unknown parameters.
fn check_switches(module: &str, parameters: &str) -> Result<()> {
    for switch in parameters.split(' ').filter_map(|p| p.strip_suffix("=0")) {
        let file = format!("/sys/module/{module}/parameters/{switch}");
        let value = fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
        ensure!(value.trim() == "N", "{module}.{switch} is {value:?}");
    }
    Ok(())
}

/// The words of `name=word,word` on the kernel's command line.
fn list(name: &str) -> Vec<String> {
    option(name).map(|text| words(&text)).unwrap_or_default()
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
