//! The handle: TAPs with programs on them.

use std::{
    fmt, fs,
    io::{self, PipeWriter},
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, sync_channel},
    },
    thread::{self, JoinHandle},
};

use ipnet::IpNet;
use model::{SandboxId, guest};
use serde::{Deserialize, Serialize};

use crate::{
    Access, Counters, IsolationError, NetEvent, Policy,
    clock::monotonic_ns,
    datapath::{Datapath, FlowMaps, Home, Sizes, TapProgram},
    error::{system, unsuitable},
    gateway::{Gateway, MAX_TAPS},
    keeper,
    layout::Settings,
    owner::{Next, Owner},
    porter,
    records::reason,
    uplink,
};

/// Events that wait for their reader; more are lost, and counted.
const EVENTS: usize = 4096;
/// Flows of all sandboxes at a time, at most.
const ALL_FLOWS: u32 = 1 << 22;
/// What the programs need: tcx.
const KERNEL: (u32, u32) = (6, 6);
/// Bits of `CapEff`, and their names. CAP_PERFMON is for reading the kernel's own structure of a packet.
const CAPABILITIES: [(u32, &str); 3] =
    [(12, "CAP_NET_ADMIN"), (38, "CAP_PERFMON"), (39, "CAP_BPF")];

/// How isolation is set up on a host.
#[derive(Clone, Debug)]
pub struct IsolationConfig {
    /// Name of this installation: in the names of its TAPs' pins and of nobody else's. Lower-case letters and
    /// digits; derived from the state directory.
    pub instance: String,
    /// Directory in a bpffs (`/sys/fs/bpf/cube`): where programs and maps outlive this process.
    pub pins: PathBuf,
    /// Where packets may leave the host.
    pub uplinks: Uplinks,
    /// What the operator opens of the ranges that are denied to all.
    pub exceptions: Vec<Exception>,
    /// Where our resolver asks by default; empty: what /etc/resolv.conf says.
    pub dns_servers: Vec<std::net::SocketAddr>,
    /// TAPs kept ready.
    pub stock: u32,
    /// TAPs at most.
    pub max_taps: u32,
    /// Flows of one sandbox at a time, at most.
    pub max_flows: u32,
    /// Bytes a second of one sandbox, each way, at most; a policy can only ask for less. Absent: no limit.
    pub bytes_per_s: Option<u64>,
}

/// Interfaces by which packets may leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uplinks {
    /// Those of the default routes, looked up at the start.
    DefaultRoutes,
    /// These.
    Named(Vec<String>),
}

/// What an operator opens of a range that is denied to all. A sandbox's policy has to allow it besides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exception {
    /// Which addresses.
    pub block: IpNet,
    /// Which services; empty: all.
    pub access: Vec<Access>,
}

/// Number of a TAP: 1 to `max_taps`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TapIndex(pub u32);

/// A TAP that a VMM can be given.
#[derive(Debug)]
pub struct Tap {
    /// See [`TapIndex`].
    pub index: TapIndex,
    /// Open, with IFF_VNET_HDR as the VMM wants it.
    pub fd: OwnedFd,
}

/// A cloneable handle; calls may come from any thread of the network namespace in which it was opened, and take
/// microseconds to a millisecond. [`Isolation::take`] waits for a TAP if none is ready.
#[derive(Clone)]
pub struct Isolation(Arc<Running>);

/// Ends with the last handle, in whose thread everything is put in order: what a thread of its own did might not be
/// done when the program is.
struct Running {
    shared: Arc<Shared>,
    /// Closed, it tells the keeper to end.
    end: Option<PipeWriter>,
    /// The keeper and the porter.
    threads: Vec<JoinHandle<()>>,
}

/// What the handles and the keeper's thread have in common.
pub(crate) struct Shared {
    owner: Mutex<Owner>,
    /// Tells the porter of work, and those who wait for a TAP of its success.
    pub(crate) called: Condvar,
    pub(crate) flows: Mutex<FlowMaps>,
    pub(crate) tap_program: TapProgram,
    gateway: Gateway,
    pub(crate) stock: usize,
}

impl fmt::Debug for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gateway = &self.0.shared.gateway;
        f.debug_tuple("Isolation").field(gateway).finish()
    }
}

impl Isolation {
    /// Loads the programs, or takes over the maps of a predecessor with the same layout; removes what dead
    /// predecessors left. TAPs whose VMM lives are kept until [`Isolation::adopt`] or [`Isolation::release`].
    ///
    /// # Errors
    /// See [`IsolationError`].
    pub fn open(config: &IsolationConfig) -> Result<(Self, Receiver<NetEvent>), IsolationError> {
        check_host()?;
        check_config(config)?;
        let home = Home::open(&config.pins, &config.instance)?;
        let gateway = Gateway::open()?;
        let (events, receiver) = sync_channel(EVENTS);
        let datapath = Datapath::load(
            home,
            &settings(&gateway, uplink::routing_device()?),
            sizes(config),
        )?;
        let mut maps = datapath.flow_maps()?;
        let mut owner = Owner::new(config, datapath, events)?;
        owner.datapath.attach_resolver(&gateway.device.name)?;
        owner.attach_uplinks(&config.uplinks)?;
        owner.read_addresses()?;
        owner.credit(&maps.reap(monotonic_ns()).removed);
        let descriptor = owner.datapath.records_fd().try_clone_to_owned();
        let records = descriptor.map_err(|e| system("copy a descriptor", e))?;
        let shared = Arc::new(Shared {
            tap_program: owner.datapath.tap_program.clone(),
            owner: Mutex::new(owner),
            flows: Mutex::new(maps),
            called: Condvar::new(),
            gateway,
            stock: usize::try_from(config.stock).unwrap_or(usize::MAX),
        });
        let (ended, end) = io::pipe().map_err(|e| system("make a pipe", e))?;
        let kept = Arc::clone(&shared);
        let keeper = thread::Builder::new()
            .name("net-keeper".to_owned())
            .spawn(move || keeper::run(&kept, &records, &ended))
            .map_err(|e| system("start a thread", e))?;
        let served = Arc::clone(&shared);
        let porter = thread::Builder::new()
            .name("net-porter".to_owned())
            .spawn(move || porter::run(&served))
            .map_err(|e| system("start a thread", e))?;
        let running = Running {
            shared,
            end: Some(end),
            threads: vec![keeper, porter],
        };
        Ok((Self(Arc::new(running)), receiver))
    }

    /// A TAP that denies everything, verified: for a VM that waits.
    ///
    /// # Errors
    /// See [`IsolationError`].
    pub fn take(&self) -> Result<Tap, IsolationError> {
        self.0.shared.take()
    }

    /// Takes back a TAP of a VM that outlived the predecessor, with the policy that it had.
    ///
    /// # Errors
    /// See [`IsolationError`]. The VM has to end then.
    pub fn adopt(
        &self,
        index: TapIndex,
        sandbox: &SandboxId,
        policy: &Policy,
    ) -> Result<(), IsolationError> {
        self.with(|owner| owner.adopt(index.0, sandbox, policy))
    }

    /// Makes the TAP this sandbox's, with this policy from the next packet on, and verifies it.
    ///
    /// # Errors
    /// See [`IsolationError`]. Nothing passes then.
    pub fn confine(
        &self,
        index: TapIndex,
        sandbox: &SandboxId,
        policy: &Policy,
    ) -> Result<(), IsolationError> {
        self.with(|owner| owner.confine(index.0, sandbox, policy))
    }

    /// Replaces the policy at once; open connections to what is denied now are cut.
    ///
    /// # Errors
    /// See [`IsolationError`]. The old policy holds then, but after [`IsolationError::Mismatch`], which says that
    /// somebody else changed the TAP: release it.
    pub fn update(&self, index: TapIndex, policy: &Policy) -> Result<(), IsolationError> {
        self.with(|owner| owner.update(index.0, policy))
    }

    /// Reads back programs, links and maps and compares them with the policy.
    ///
    /// # Errors
    /// See [`IsolationError`].
    pub fn verify(&self, index: TapIndex) -> Result<(), IsolationError> {
        self.with(|owner| owner.verify(index.0))
    }

    /// Removes everything of a TAP whose VMM is gone, or never was: at once nothing passes. Another sandbox may have its
    /// device then, under another number. Of one that is not there: nothing.
    pub fn release(&self, index: TapIndex) {
        self.with(|owner| owner.release(index.0, Next::Another));
        self.0.shared.called.notify_all();
    }

    /// The same of a TAP whose VMM may be there: its device goes, and with it what the VMM has.
    pub fn discard(&self, index: TapIndex) {
        self.with(|owner| owner.release(index.0, Next::Nobody));
        self.0.shared.called.notify_all();
    }

    /// What passed and what did not.
    ///
    /// # Errors
    /// See [`IsolationError`].
    pub fn counters(&self, index: TapIndex) -> Result<Counters, IsolationError> {
        self.with(|owner| owner.counters(index.0))
    }

    /// Lets the sandbox reach an address that was answered for a name, until `ttl` after now and while flows to it
    /// are open. The resolver's.
    ///
    /// # Errors
    /// See [`IsolationError`]: the TAP is another sandbox's by now, its policy has not the name any more, or it has
    /// too many addresses.
    pub fn pin(
        &self,
        index: TapIndex,
        sandbox: &SandboxId,
        address: IpAddr,
        name: &str,
        ttl: std::time::Duration,
    ) -> Result<(), IsolationError> {
        self.with(|owner| owner.pin(index.0, sandbox, address, name, ttl))
    }

    /// Sockets to which queries of all sandboxes come: one port of a device that only guests reach. Each call gives
    /// copies of the same two, in blocking mode.
    ///
    /// # Errors
    /// Of copying descriptors.
    pub fn resolver_sockets(&self) -> io::Result<(UdpSocket, TcpListener)> {
        self.0.shared.gateway.sockets()
    }

    /// Who asks from an address of [`Isolation::resolver_sockets`], and under which policy. Nothing for others, and
    /// for a TAP that waits.
    #[must_use]
    pub fn tap_of(&self, peer: SocketAddr) -> Option<(TapIndex, SandboxId, Arc<Policy>)> {
        let index = self.0.shared.gateway.tap_of(peer)?;
        let seat = |owner: &mut Owner| owner.seat(index).ok()?.sandbox.clone();
        let (sandbox, policy) = self.with(seat)?;
        Some((TapIndex(index), sandbox, policy))
    }

    fn with<T>(&self, work: impl FnOnce(&mut Owner) -> T) -> T {
        self.0.shared.with(work)
    }

    /// For tests: what the owner has.
    #[cfg(test)]
    pub(crate) fn inspect<T>(&self, look: impl FnOnce(&mut Owner) -> T) -> T {
        self.with(look)
    }

    /// Counts and tells what the resolver refused.
    pub fn record(&self, index: TapIndex, event: NetEvent) {
        self.with(|owner| owner.record(index.0, event));
    }
}

impl Shared {
    /// The one lock; nothing that waits is done under it.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Owner) -> T) -> T {
        work(&mut self.lock())
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Owner> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.end.take());
        self.shared.with(|owner| owner.ended = true);
        self.shared.called.notify_all();
        for thread in self.threads.drain(..) {
            // If it panicked, it said so already.
            let _told = thread.join();
        }
        self.shared.with(Owner::end);
    }
}

impl Owner {
    fn counters(&mut self, index: u32) -> Result<Counters, IsolationError> {
        let state = self.state(index)?;
        self.records.flush(&mut self.datapath, &self.seats, index);
        let seat = self.seat(index)?;
        let before = &seat.before;
        let refused_since = state.refused.iter().zip(before.refused);
        let numbered = (0_u8..)
            .zip(refused_since.map(|(now, then)| now - then))
            .filter(|(_, count)| *count > 0);
        let mut refused: std::collections::BTreeMap<_, _> = numbered
            .filter_map(|(number, count)| Some((reason(number)?, count)))
            .collect();
        let total: u64 = state.refused.iter().sum();
        for (reason, count) in &seat.unanswered {
            *refused.entry(*reason).or_default() += count;
        }
        Ok(Counters {
            packets_out: state.packets_out - before.packets_out,
            bytes_out: state.bytes_out - before.bytes_out,
            packets_in: state.packets_in - before.packets_in,
            bytes_in: state.bytes_in - before.bytes_in,
            flows: state.opened - before.opened,
            refused,
            events_lost: total.saturating_sub(self.records.told(index)) + seat.untold,
        })
    }

    fn record(&mut self, index: u32, event: NetEvent) {
        let (reason, count) = (event.reason, event.count);
        let told = self.records.send(event);
        if let Ok(seat) = self.seat_mut(index) {
            *seat.unanswered.entry(reason).or_default() += count;
            seat.untold += if told { 0 } else { count };
        }
    }
}

fn check_host() -> Result<(), IsolationError> {
    let kernel = nix::sys::utsname::uname()
        .map_err(|e| system("read the kernel's version", io::Error::from(e)))?;
    let release = kernel.release().to_string_lossy().into_owned();
    let mut numbers = release
        .split(['.', '-'])
        .map(|n| n.parse::<u32>().unwrap_or(0));
    if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < KERNEL {
        let (major, minor) = KERNEL;
        return Err(unsuitable(
            format!("Linux {release} has no tcx"),
            format!("boot Linux {major}.{minor} or newer"),
        ));
    }
    let status = fs::read_to_string("/proc/thread-self/status")
        .map_err(|e| system("read the capabilities", e))?;
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let held = line
        .and_then(|text| u64::from_str_radix(text.trim(), 16).ok())
        .unwrap_or(0);
    let missing = CAPABILITIES.iter().find(|(bit, _)| held >> bit & 1 == 0);
    if let Some((_, name)) = missing {
        return Err(unsuitable(
            format!("{name} is missing"),
            "run as root, or give the service AmbientCapabilities=CAP_NET_ADMIN CAP_BPF CAP_PERFMON",
        ));
    }
    if !fs::exists("/dev/net/tun").unwrap_or(false) {
        return Err(unsuitable("there is no /dev/net/tun", "modprobe tun"));
    }
    Ok(())
}

fn check_config(config: &IsolationConfig) -> Result<(), IsolationError> {
    let name = &config.instance;
    let is_fine = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    if name.is_empty() || !name.bytes().all(is_fine) {
        return Err(unsuitable(
            format!("{name:?} is no name of an instance"),
            "use lower-case letters and digits",
        ));
    }
    if config.max_taps == 0 || config.max_taps > MAX_TAPS || config.max_flows == 0 {
        return Err(unsuitable(
            format!(
                "{} TAPs with {} flows each",
                config.max_taps, config.max_flows
            ),
            format!("ask for 1 to {MAX_TAPS} TAPs and at least one flow"),
        ));
    }
    Ok(())
}

fn sizes(config: &IsolationConfig) -> Sizes {
    Sizes {
        taps: config.max_taps,
        flows: config
            .max_taps
            .saturating_mul(config.max_flows)
            .min(ALL_FLOWS),
    }
}

fn settings(gateway: &Gateway, route_ifindex: u32) -> Settings {
    Settings {
        guest4: guest::IPV4.into(),
        guest6: guest::IPV6.into(),
        gateway4: guest::GATEWAY4.into(),
        gateway6: guest::GATEWAY6.into(),
        resolver4: gateway.address4.into(),
        resolver6: gateway.program_address6(),
        resolver_ifindex: gateway.device.index,
        route_ifindex,
        resolver_port: gateway.program_port(),
        first_port: gateway.first_port,
        ports: gateway.ports,
        guest_mac: guest::MAC,
        gateway_mac: guest::GATEWAY_MAC,
        resolver_mac: gateway.mac,
    }
}
