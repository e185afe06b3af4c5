//! A host and an outside of a command's own, in network namespaces that go with it.
//!
//! ```text
//! this process, its server and VMs            namespace "outside"
//! up0 192.0.2.2 ───────── veth ───────────    out0 192.0.2.1
//! TAPs of sandboxes                           lo: every address of some blocks
//! ```
//! The host the command runs on is not touched, and nothing is left, however the command ends.

mod plain;
mod sys;

use std::{fs, fs::File, io, net::Ipv4Addr, os::fd::AsRawFd, process::Command, thread};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, setns, unshare},
    unistd::gettid,
};

pub use plain::PlainNetwork;
pub use sys::open_tap;

/// Name of the uplink.
pub const UPLINK: &str = "up0";
/// Its other end.
pub const OUTSIDE: &str = "out0";
/// Address of the uplink.
pub const HOST4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

/// Why there is no world.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot {what}; this needs root, namespaces, a bpffs and the program {program} ({package})"
)]
pub struct WorldError {
    what: String,
    program: &'static str,
    package: &'static str,
    #[source]
    source: io::Error,
}

pub fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> WorldError {
    failed_with("ip", "package iproute2", what)
}

/// The same where another program than `ip` is needed.
pub fn failed_with(
    program: &'static str,
    package: &'static str,
    what: impl Into<String>,
) -> impl FnOnce(io::Error) -> WorldError {
    let what = what.into();
    move |source| WorldError {
        what,
        program,
        package,
        source,
    }
}

/// A network namespace. Nobody need be in it: it lives while the file is open.
#[derive(Debug)]
pub struct Namespace(File);

impl Namespace {
    /// A new one, whose loopback interface is up.
    ///
    /// # Errors
    /// No right to make one, or no `ip`.
    pub fn new() -> Result<Self, WorldError> {
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET)?;
            ip("link set lo up")?;
            File::open("/proc/thread-self/ns/net")
        };
        thread::scope(|scope| scope.spawn(make).join())
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            .map(Self)
            .map_err(failed("make a network namespace"))
    }

    /// Names it to programs that this process starts and waits for.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// Runs `work` on a thread in it.
    ///
    /// # Errors
    /// Those of `work`, or of entering.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        let work = || {
            setns(&self.0, CloneFlags::CLONE_NEWNET)?;
            work()
        };
        thread::scope(|scope| scope.spawn(work).join())
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Moves this process into a network and a mount namespace of its own for good, as a host whose one way out leads
/// to the namespace that is returned. Out there somebody is at every address of `blocks` (of either family). No
/// thread may run yet.
///
/// # Errors
/// See [`WorldError`].
pub fn enter<'a>(blocks: impl IntoIterator<Item = &'a str>) -> Result<Namespace, WorldError> {
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)
        .map_err(io::Error::from)
        .map_err(failed("leave the host's network"))?;
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .map_err(io::Error::from)
        .map_err(failed("keep mounts to itself"))?;
    // What is pinned there goes with the last process in here.
    mount(
        Some("bpf"),
        "/sys/fs/bpf",
        Some("bpf"),
        MsFlags::empty(),
        none,
    )
    .map_err(io::Error::from)
    .map_err(failed("mount a bpffs at /sys/fs/bpf"))?;
    let outside = Namespace::new()?;
    build_outside(&outside, blocks)?;
    let lines = format!(
        "link set lo up\n\
         address add {HOST4}/29 dev {UPLINK}\n\
         address add 2001:db8:1::2/64 dev {UPLINK} nodad\n\
         link set {UPLINK} up\n\
         route add default via 192.0.2.1\n\
         route add default via 2001:db8:1::1\n"
    );
    ip(&lines).map_err(failed("set up the namespace of the host"))?;
    Ok(outside)
}

/// Moves this process into a network of its own for good, in which there is nothing but the loopback interface. Needs no
/// program. No thread may run yet.
///
/// # Errors
/// See [`WorldError`].
pub fn alone() -> Result<(), WorldError> {
    unshare(CloneFlags::CLONE_NEWNET)
        .map_err(io::Error::from)
        .and_then(|()| sys::loopback_up())
        .map_err(failed("make a network of its own"))
}

fn build_outside<'a>(
    outside: &Namespace,
    blocks: impl IntoIterator<Item = &'a str>,
) -> Result<(), WorldError> {
    let host = gettid();
    let mut lines = format!(
        "link add {OUTSIDE} type veth peer name {UPLINK} netns {host}\n\
         address add 192.0.2.1/29 dev {OUTSIDE}\n\
         address add 2001:db8:1::1/64 dev {OUTSIDE} nodad\n\
         link set {OUTSIDE} up\n"
    );
    for block in blocks {
        lines += &format!("route add local {block} dev lo\n");
    }
    outside
        .within(|| {
            ip(&lines)?;
            settings(&[
                ("ipv4/conf/all/rp_filter", "0"),
                ("ipv4/conf/default/rp_filter", "0"),
                // Who is there by a route alone answers from that address, too.
                ("ipv6/ip_nonlocal_bind", "1"),
            ])
        })
        .map_err(failed("set up the namespace outside"))
}

/// Writes settings of the network, in the namespace of this thread.
pub fn settings(values: &[(&str, &str)]) -> io::Result<()> {
    values
        .iter()
        .try_for_each(|(name, value)| fs::write(format!("/proc/sys/net/{name}"), value))
}

/// Carries out lines of `ip`, in the namespace of this thread.
pub fn ip(lines: &str) -> io::Result<()> {
    lines.lines().try_for_each(|line| run("ip", line))
}

/// Runs a program with the words of a line, in the namespace of this thread.
pub fn run(program: &str, line: &str) -> io::Result<()> {
    let done = Command::new(program)
        .args(line.split_whitespace())
        .output()?;
    if done.status.success() {
        Ok(())
    } else {
        let said = String::from_utf8_lossy(&done.stderr);
        Err(io::Error::other(format!(
            "{program} {line}: {}",
            said.trim()
        )))
    }
}
