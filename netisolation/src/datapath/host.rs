//! Checks that the host can run the eBPF programs.

use std::{fs, io};

use crate::error::{IsolationError, system, unsuitable};

/// The first kernel with tcx links.
const KERNEL: (u32, u32) = (6, 6);
/// Bit in `CapEff` and name. Reading `struct sk_buff` from a program needs CAP_PERFMON.
const CAPABILITIES: [(u32, &str); 3] =
    [(12, "CAP_NET_ADMIN"), (38, "CAP_PERFMON"), (39, "CAP_BPF")];

/// Checks the kernel version, this thread's capabilities and `/dev/net/tun`.
pub(crate) fn check() -> Result<(), IsolationError> {
    check_kernel()?;
    check_capabilities()?;
    if !fs::exists("/dev/net/tun").unwrap_or(false) {
        return Err(unsuitable("/dev/net/tun does not exist", "modprobe tun"));
    }
    Ok(())
}

fn check_kernel() -> Result<(), IsolationError> {
    let kernel = nix::sys::utsname::uname()
        .map_err(|e| system("read the kernel's version", io::Error::from(e)))?;
    let release = kernel.release().to_string_lossy().into_owned();
    let mut numbers = release
        .split(['.', '-'])
        .map(|n| n.parse::<u32>().unwrap_or(0));
    if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < KERNEL {
        let (major, minor) = KERNEL;
        return Err(unsuitable(
            format!("Linux {release} does not support tcx"),
            format!("boot Linux {major}.{minor} or newer"),
        ));
    }
    Ok(())
}

fn check_capabilities() -> Result<(), IsolationError> {
    let status = fs::read_to_string("/proc/thread-self/status")
        .map_err(|e| system("read the capabilities", e))?;
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let held = line
        .and_then(|text| u64::from_str_radix(text.trim(), 16).ok())
        .unwrap_or(0);
    let missing = CAPABILITIES.iter().find(|(bit, _)| held >> bit & 1 == 0);
    match missing {
        None => Ok(()),
        Some((_, name)) => Err(unsuitable(
            format!("{name} is missing"),
            "run as root, or give the service AmbientCapabilities=CAP_NET_ADMIN CAP_BPF CAP_PERFMON",
        )),
    }
}
