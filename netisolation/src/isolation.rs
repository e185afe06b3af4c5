//! The public handle to network isolation.

pub(crate) mod owner;
pub(crate) mod shared;

// The threads.
mod maintenance;
mod replenish;

use std::{
    fmt,
    io::{self, PipeWriter},
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::AsFd,
    sync::{
        Arc,
        mpsc::{Receiver, sync_channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use model::{SandboxId, guest};

use self::{owner::Owner, shared::Shared};
use crate::{
    config::IsolationConfig,
    datapath::{
        Datapath, Sizes,
        bpffs::InstanceDir,
        clock::monotonic_ns,
        gateway::{Gateway, ResolverSockets},
        host,
        layout::Settings,
        proxy_group::ProxyGroup,
    },
    enforcement::{Enforcement, tap_table::Attachment, uplink},
    error::{IsolationError, system},
    events::event::{Counters, NetEvent},
    handed::HandedFlow,
    policy::Policy,
    taps::{
        stock::{Disposal, TapStock},
        tap::{Tap, TapIndex},
    },
};

/// Maximum number of events that wait for the receiver. Further events are dropped and counted.
const EVENT_QUEUE: usize = 4096;

/// A cloneable handle. Its methods may be called from any thread in the network namespace in which it was opened. They
/// take at most about a millisecond, except that [`Isolation::take`] waits if no TAP is ready.
#[derive(Clone)]
pub struct Isolation(Arc<Running>);

/// Dropped with the last handle. Dropping it joins the threads and cleans up, because detached threads might not finish
/// before the process exits.
struct Running {
    shared: Arc<Shared>,
    /// Closing this end stops the maintenance thread.
    stop: Option<PipeWriter>,
    threads: Vec<JoinHandle<()>>,
    /// The error says why the kernel does not judge the proxies' connections.
    proxy_group: Result<ProxyGroup, IsolationError>,
}

impl fmt::Debug for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gateway = &self.0.shared.gateway;
        f.debug_tuple("Isolation").field(gateway).finish()
    }
}

impl Isolation {
    /// Takes over the programs, the maps and the ready TAPs of a predecessor, as far as they have the same build and
    /// settings, makes the others, and removes the leftovers of other predecessors. A predecessor's TAPs whose VMs
    /// still run are kept. Each must be passed to [`Isolation::adopt`] or [`Isolation::release`]. Also returns the
    /// queue of refusal events.
    ///
    /// # Errors
    /// Returns [`IsolationError::Unsuitable`] if the host, an uplink or the configuration does not allow isolation, or
    /// another server uses the instance, and [`IsolationError::System`] if a system call fails.
    pub fn open(config: &IsolationConfig) -> Result<(Self, Receiver<NetEvent>), IsolationError> {
        Self::open_with(config, None)
    }

    /// Like [`Isolation::open`], but uses the sockets of the predecessor ([`Isolation::resolver_sockets`]) if they
    /// still fit. DNS queries and connections for the proxy that arrived since the predecessor stopped are then waiting
    /// in them.
    ///
    /// # Errors
    /// Returns the errors of [`Isolation::open`].
    pub fn open_with(
        config: &IsolationConfig,
        sockets: Option<ResolverSockets>,
    ) -> Result<(Self, Receiver<NetEvent>), IsolationError> {
        host::check()?;
        config.check()?;
        let dir = InstanceDir::open(&config.pins, &config.instance)?;
        let gateway = Gateway::open(&dir.resolvers(), sockets, config.proxy)?;
        let (events, receiver) = sync_channel(EVENT_QUEUE);
        let settings = settings(&gateway, uplink::routing_device()?);
        let (datapath, maps) = Datapath::load(dir, &settings, Sizes::of(config))?;
        let (mut flows, handed) = (datapath.flow_maps()?, datapath.flow_maps()?);
        let mut enforcement = Enforcement::new(config, datapath, maps, events)?;
        enforcement.attach(&gateway.device, &config.uplinks)?;
        let proxy_group = ProxyGroup::find(config).and_then(|group| {
            if config.proxy {
                // The rules for all sandboxes have been written.
                group.guard(enforcement.datapath.connect_programs()?)?;
            }
            Ok(group)
        });
        gateway.set_persistent(true)?;
        let swept = flows.sweep(monotonic_ns());
        enforcement.taps.credit_flows(&swept.removed);
        let ring = enforcement.refusals.ring().as_fd().try_clone_to_owned();
        let ring = ring.map_err(|e| system("duplicate the ring buffer's descriptor", e))?;
        let mut stock = TapStock::new(usize::try_from(config.stock).unwrap_or(usize::MAX));
        for (index, _) in enforcement.taps.iter().filter(|(_, tap)| tap.is_ready()) {
            stock.add_new(index);
        }
        let owner = Owner::new(enforcement, stock);
        let shared = Arc::new(Shared::new(owner, flows, handed, gateway));
        let (stopped, stop) = io::pipe().map_err(|e| system("create a pipe", e))?;
        let (maintained, replenished) = (Arc::clone(&shared), Arc::clone(&shared));
        let threads = vec![
            spawn("net-maintenance", move || {
                maintenance::run(&maintained, &ring, &stopped);
            })?,
            spawn("net-tap-stock", move || replenish::run(&replenished))?,
        ];
        let running = Running {
            shared,
            stop: Some(stop),
            threads,
            proxy_group,
        };
        Ok((Self(Arc::new(running)), receiver))
    }

    /// Takes a TAP for a VM. The TAP is verified and denies everything until [`Isolation::confine`].
    ///
    /// # Errors
    /// Returns [`IsolationError::Exhausted`] if all numbers are in use, [`IsolationError::Mismatch`] if the TAP fails
    /// verification (it is then removed), or [`IsolationError::System`] if a system call fails or no TAP becomes ready
    /// within 30 s.
    pub fn take(&self) -> Result<Tap, IsolationError> {
        self.0.shared.take()
    }

    /// Continues the sandbox of a VM that outlived this server's predecessor.
    ///
    /// # Errors
    /// Returns an error under the conditions of [`Isolation::confine`]. After an error, no packet passes, and the VM
    /// must be ended.
    pub fn adopt(
        &self,
        index: TapIndex,
        sandbox: &SandboxId,
        policy: &Policy,
    ) -> Result<(), IsolationError> {
        self.with(|owner| owner.adopt(index.0, sandbox, policy))
    }

    /// Assigns a TAP to a sandbox, puts the policy into force from the next packet on, and verifies the TAP.
    ///
    /// # Errors
    /// Returns [`IsolationError::Unknown`] if there is no such TAP, [`IsolationError::TooMany`] if the policy exceeds a
    /// limit, [`IsolationError::Mismatch`] if verification finds a difference, or [`IsolationError::System`] if a
    /// system call fails. After an error, no packet passes.
    pub fn confine(
        &self,
        index: TapIndex,
        sandbox: &SandboxId,
        policy: &Policy,
    ) -> Result<(), IsolationError> {
        self.with(|owner| owner.confine(index.0, sandbox, policy))
    }

    /// Replaces a sandbox's policy from the next packet on. Connections that the new policy denies are cut.
    ///
    /// # Errors
    /// Returns an error under the conditions of [`Isolation::confine`], and [`IsolationError::Unknown`] if the TAP has
    /// no sandbox. If the new policy cannot be written, the old one stays in force, but names that only the old one
    /// allows must be queried again. If the verification after the write fails, with [`IsolationError::Mismatch`] or
    /// [`IsolationError::System`], the new policy was written. After a mismatch, the TAP must be released: another
    /// program has changed the kernel's state.
    pub fn update(&self, index: TapIndex, policy: &Policy) -> Result<(), IsolationError> {
        self.with(|owner| owner.update(index.0, policy))
    }

    /// Reads the state of the TAP's device, programs and map entries back and compares it with the policy.
    ///
    /// # Errors
    /// Returns [`IsolationError::Unknown`] if there is no such TAP, [`IsolationError::Mismatch`] with the first
    /// difference, or [`IsolationError::System`] if the kernel's state cannot be read.
    pub fn verify(&self, index: TapIndex) -> Result<(), IsolationError> {
        self.with(|owner| owner.verify(index.0))
    }

    /// Closes a TAP whose VMM must have ended or never started. From now on no packet passes. Another sandbox may get
    /// the device under another number. Does nothing if there is no such TAP.
    pub fn release(&self, index: TapIndex) {
        self.dispose(index, Disposal::Reuse);
    }

    /// Closes a TAP whose VMM may still run, and removes the device, so that the VMM's descriptor becomes useless.
    pub fn discard(&self, index: TapIndex) {
        self.dispose(index, Disposal::Remove);
    }

    fn dispose(&self, index: TapIndex, disposal: Disposal) {
        let shared = &self.0.shared;
        shared.with(|owner| owner.release(index.0, disposal));
        shared.stock_changed.notify_all();
    }

    /// Counters of the TAP's sandbox.
    ///
    /// # Errors
    /// Returns [`IsolationError::Unknown`] if there is no such TAP, or [`IsolationError::System`] if its state cannot
    /// be read.
    pub fn counters(&self, index: TapIndex) -> Result<Counters, IsolationError> {
        self.with(|owner| owner.counters(index.0))
    }

    /// Allows a sandbox to reach an address to which the resolver resolved a name: new flows until `ttl` from now, and
    /// open flows until they end.
    ///
    /// # Errors
    /// Returns [`IsolationError::Unknown`] if the TAP now belongs to another sandbox or the policy does not match
    /// the name, [`IsolationError::TooMany`] if the sandbox has too many pins, or [`IsolationError::System`].
    pub fn pin(
        &self,
        index: TapIndex,
        sandbox: &SandboxId,
        address: IpAddr,
        name: &str,
        ttl: Duration,
    ) -> Result<(), IsolationError> {
        self.with(|owner| owner.pin(index.0, sandbox, address, name, ttl))
    }

    /// The sockets that receive the DNS queries of all sandboxes, and the proxy's listener. They are bound to a device
    /// that only guests can reach. Each call duplicates the same sockets. They are initially blocking; changing the
    /// mode of one duplicate changes it for all.
    ///
    /// # Errors
    /// Returns an error if a descriptor cannot be duplicated.
    pub fn resolver_sockets(&self) -> io::Result<ResolverSockets> {
        self.0.shared.gateway.sockets()
    }

    /// The socket that accepts the flows that are redirected to the proxy. Only guests can reach it. Each call
    /// duplicates the same socket, which stays open as long as this handle. While no process accepts from it,
    /// connections wait.
    ///
    /// # Errors
    /// Returns [`io::ErrorKind::Unsupported`] without [`IsolationConfig::proxy`], or an error if the descriptor cannot
    /// be duplicated.
    pub fn proxy_listener(&self) -> io::Result<TcpListener> {
        self.0.shared.gateway.proxy_listener()
    }

    /// Limits where a proxy can connect, whatever code it runs: in the kernel, by [`IsolationConfig::forbidden`] and the
    /// addresses of this host. Must be called before the process makes a socket. Does nothing if the host cannot do
    /// that ([`Isolation::unlimited_proxy`]).
    ///
    /// # Errors
    /// Returns [`IsolationError::System`] if the process cannot be moved into the proxies' cgroup, as without
    /// [`IsolationConfig::proxy`].
    pub fn limit_proxy(&self, pid: u32) -> Result<(), IsolationError> {
        let group = self.0.proxy_group.as_ref();
        group.map_or(Ok(()), |group| group.join(pid))
    }

    /// Why [`Isolation::limit_proxy`] does nothing. `None`: it limits.
    #[must_use]
    pub fn unlimited_proxy(&self) -> Option<&IsolationError> {
        self.0.proxy_group.as_ref().err()
    }

    /// The flow that was accepted from [`Isolation::proxy_listener`] with this peer address. `None` if there is no such
    /// flow, its sandbox has ended, or a predecessor's sandbox has not been passed to [`Isolation::adopt`] yet
    /// ([`Isolation::awaits_adoption`] accepts this address as well). The connection must then be closed.
    #[must_use]
    pub fn handed(&self, peer: SocketAddr) -> Option<HandedFlow> {
        let shared = &self.0.shared;
        let wire = shared.gateway.wire_of(peer)?;
        let (key, tenure) = shared.handed.find_handed(&wire)?;
        self.with(|owner| owner.handed(&key, tenure))
    }

    /// The TAP, sandbox and policy behind a peer address of [`Isolation::resolver_sockets`]. `None` if the address does
    /// not belong to a TAP, or the TAP has no sandbox.
    #[must_use]
    pub fn tap_of(&self, peer: SocketAddr) -> Option<(TapIndex, SandboxId, Arc<Policy>)> {
        let index = self.0.shared.gateway.tap_of(peer)?;
        let (sandbox, policy) = self.with(|owner| owner.taps.get(index).ok()?.sandbox.clone())?;
        Some((TapIndex(index), sandbox, policy))
    }

    /// Whether a peer address of [`Isolation::resolver_sockets`] belongs to a predecessor's sandbox that has not been
    /// passed to [`Isolation::adopt`] yet.
    #[must_use]
    pub fn awaits_adoption(&self, peer: SocketAddr) -> bool {
        let index = self.0.shared.gateway.tap_of(peer);
        let awaits = |tap: &Attachment| tap.sandbox.is_none() && tap.entry.tenure != 0;
        index.is_some_and(|index| self.with(|owner| owner.taps.get(index).is_ok_and(awaits)))
    }

    /// Counts and reports DNS queries that the resolver refused.
    pub fn record(&self, index: TapIndex, event: NetEvent) {
        self.with(|owner| owner.refusals.record_query(index.0, event));
    }

    /// Whether this is the only handle. Dropping the last handle closes everything.
    #[must_use]
    pub fn is_last(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    fn with<T>(&self, work: impl FnOnce(&mut Enforcement) -> T) -> T {
        self.0.shared.with(|owner| work(&mut owner.enforcement))
    }

    /// Sweeps, and returns the time of the last full sweep.
    #[cfg(test)]
    pub(crate) fn sweep(&self) -> u64 {
        self.0.shared.sweep();
        self.0.shared.last_full_sweep()
    }

    /// Gives tests access to the maps.
    #[cfg(test)]
    pub(crate) fn inspect<T>(&self, look: impl FnOnce(&mut Enforcement) -> T) -> T {
        self.with(look)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
        self.shared.with(|owner| owner.stock.stop());
        self.shared.stock_changed.notify_all();
        for thread in self.threads.drain(..) {
            // A panic has already been printed by the panicking thread.
            let _printed = thread.join();
        }
        if !self.shared.with(Owner::shut_down) {
            // If this fails, the device stays until the next server of this namespace needs its slot.
            let _stays = self.shared.gateway.set_persistent(false);
        }
        // The next server waits for the lock, which `shared` holds.
        if let Ok(group) = &self.proxy_group {
            group.close();
        }
    }
}

fn spawn(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, IsolationError> {
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(run)
        .map_err(|e| system(format!("start the thread {name}"), e))
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
        proxy_port: gateway.program_proxy_port(),
        first_port: gateway.first_port,
        ports: gateway.ports,
        zero: 0,
        guest_mac: guest::MAC,
        gateway_mac: guest::GATEWAY_MAC,
        resolver_mac: gateway.mac,
    }
}
