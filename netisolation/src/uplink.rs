//! Where packets may leave, and in whose name.

use std::{collections::BTreeSet, net::IpAddr};

use crate::{
    IsolationError, Uplinks,
    device::{self, Assigned},
    error::{system, unsuitable},
    layout::Uplink,
    owner::Owner,
};

/// Routes are looked up as the host's own are: as if from here.
const ROUTING_DEVICE: &str = "lo";

/// What IPv6 asks of every link (RFC 8200, 5): the least MTU of an uplink.
const LEAST_MTU: u32 = 1280;

/// The device index for lookups of routes, which the kernel does for devices that forward. Nothing is forwarded: what
/// comes in by the loopback device is the host's.
pub(crate) fn routing_device() -> Result<u32, IsolationError> {
    let set = || {
        device::ensure("ipv4", ROUTING_DEVICE, "forwarding", "1")?;
        if device::has_ipv6() {
            device::ensure("ipv6", ROUTING_DEVICE, "forwarding", "1")
        } else {
            Ok(())
        }
    };
    set().map_err(|e| {
        unsuitable(
            format!("/proc/sys/net/*/conf/{ROUTING_DEVICE}/forwarding cannot be set: {e}"),
            "mount /proc/sys writable, or set it to 1 beforehand",
        )
    })?;
    device::index(ROUTING_DEVICE).map_err(|e| system("find the loopback device", e))
}

impl Owner {
    /// Puts the program on the uplinks. None at all is no error: then no packet leaves.
    pub(crate) fn attach_uplinks(&mut self, wanted: &Uplinks) -> Result<(), IsolationError> {
        let names = match wanted {
            Uplinks::DefaultRoutes => {
                device::default_routes().map_err(|e| system("read the routes", e))?
            }
            Uplinks::Named(names) => names.iter().cloned().collect::<BTreeSet<_>>(),
        };
        for name in names {
            let ifindex = device::index(&name)
                .map_err(|e| unsuitable(format!("the uplink {name}: {e}"), "name another"))?;
            device::hardware_address(&name)
                .map_err(|e| unsuitable(format!("the uplink {name}: {e}"), "name another"))?;
            let mtu =
                device::mtu(&name).map_err(|e| system(format!("read the MTU of {name}"), e))?;
            if mtu < LEAST_MTU {
                return Err(unsuitable(
                    format!("the uplink {name} takes packets of {mtu} bytes"),
                    format!("ip link set {name} mtu {LEAST_MTU} (or more), or name another uplink"),
                ));
            }
            self.datapath.attach_uplink(&name, ifindex)?;
            self.uplinks.insert(ifindex, (name, Uplink::default()));
        }
        let known: Vec<u32> = self.datapath.uplinks.keys().flatten().collect();
        for ifindex in known.into_iter().filter(|i| !self.uplinks.contains_key(i)) {
            let _absent = self.datapath.uplinks.remove(&ifindex);
        }
        Ok(())
    }

    /// Reads the host's addresses: those of the uplinks are sandboxes' outside, and none is a destination. And the
    /// uplinks' MTUs.
    pub(crate) fn read_addresses(&mut self) -> Result<(), IsolationError> {
        // Whoever writes net.ipv4.ip_forward resets it.
        routing_device()?;
        let all = device::addresses().map_err(|e| system("read the host's addresses", e))?;
        let mut host: Vec<IpAddr> = all.iter().map(|a| a.address).collect();
        host.sort_unstable();
        host.dedup();
        self.set_rules_for_all(&host)?;
        for (ifindex, (name, written)) in &mut self.uplinks {
            let current = Uplink {
                // Of one that is gone for a moment there is no address either.
                mtu: device::mtu(name).unwrap_or(written.mtu),
                ..outside(&all, *ifindex)
            };
            if current != *written {
                let outcome = self.datapath.uplinks.insert(ifindex, current, 0);
                outcome.map_err(|e| system(format!("write the addresses of {name}"), e))?;
                *written = current;
            }
        }
        Ok(())
    }
}

/// The first address of each family that is fit for use; no MTU.
fn outside(all: &[Assigned], ifindex: u32) -> Uplink {
    let first = |v4: bool| {
        let mine = |a: &&Assigned| a.ifindex == ifindex && a.fit && a.address.is_ipv4() == v4;
        let found = all.iter().find(mine);
        found.map(|a| a.address.into()).unwrap_or_default()
    };
    Uplink {
        local4: first(true),
        local6: first(false),
        mtu: 0,
    }
}
