//! The interfaces through which packets leave the host, and the source addresses that packets get on them.

use std::{collections::BTreeMap, collections::BTreeSet};

use aya::maps::{HashMap, MapData};

use crate::{
    config::Uplinks,
    datapath::{Datapath, layout::Uplink},
    error::{IsolationError, system, unsuitable},
    taps::device::{self, Assigned},
};

/// The device from which the programs look up routes, so that they follow the routes of the host's own packets.
const ROUTING_DEVICE: &str = "lo";

/// IPv6's minimum link MTU (RFC 8200, 5).
const MIN_MTU: u32 = 1280;

/// The uplinks, whose packets the program `from_wire` inspects.
pub(crate) struct UplinkSet {
    map: HashMap<MapData, u32, Uplink>,
    /// Name and map entry, by device index.
    by_ifindex: BTreeMap<u32, (String, Uplink)>,
}

/// Returns the device index for route lookups. The kernel looks up routes only for devices that forward, so this
/// enables forwarding on the loopback device. The host forwards no packet because of this setting: packets that arrive
/// on loopback are the host's own.
pub(crate) fn routing_device() -> Result<u32, IsolationError> {
    let enable = || {
        device::ensure("ipv4", ROUTING_DEVICE, "forwarding", "1")?;
        if device::has_ipv6() {
            device::ensure("ipv6", ROUTING_DEVICE, "forwarding", "1")?;
        }
        Ok(())
    };
    enable().map_err(|e: std::io::Error| {
        unsuitable(
            format!("/proc/sys/net/*/conf/{ROUTING_DEVICE}/forwarding cannot be set: {e}"),
            "mount /proc/sys writable, or set it to 1 beforehand",
        )
    })?;
    device::index(ROUTING_DEVICE).map_err(|e| system("find the loopback device", e))
}

impl UplinkSet {
    pub(crate) fn new(map: HashMap<MapData, u32, Uplink>) -> Self {
        Self {
            map,
            by_ifindex: BTreeMap::new(),
        }
    }

    /// Attaches the program to the uplinks. Without any uplink no packet leaves the host, which is not an error.
    pub(crate) fn attach(
        &mut self,
        wanted: &Uplinks,
        datapath: &Datapath,
    ) -> Result<(), IsolationError> {
        let names = match wanted {
            Uplinks::DefaultRoutes => {
                device::default_routes().map_err(|e| system("read the routes", e))?
            }
            Uplinks::Named(names) => names.iter().cloned().collect::<BTreeSet<_>>(),
        };
        for name in names {
            let ifindex = check(&name)?;
            datapath.attach_uplink(&name, ifindex)?;
            self.by_ifindex.insert(ifindex, (name, Uplink::default()));
        }
        let in_kernel: Vec<u32> = self.map.keys().flatten().collect();
        for ifindex in in_kernel {
            if !self.by_ifindex.contains_key(&ifindex) {
                let _absent = self.map.remove(&ifindex);
            }
        }
        Ok(())
    }

    /// Writes the uplinks' current addresses and MTUs to the map, if they changed.
    pub(crate) fn write_addresses(&mut self, all: &[Assigned]) -> Result<(), IsolationError> {
        for (ifindex, (name, written)) in &mut self.by_ifindex {
            let current = Uplink {
                // While the device is missing, it has no addresses either, so its MTU is not used.
                mtu: device::mtu(name).unwrap_or(written.mtu),
                ..outside_addresses(all, *ifindex)
            };
            if current != *written {
                let outcome = self.map.insert(ifindex, current, 0);
                outcome.map_err(|e| system(format!("write the addresses of {name}"), e))?;
                *written = current;
            }
        }
        Ok(())
    }

    /// Device index and name of each uplink.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &str)> {
        self.by_ifindex
            .iter()
            .map(|(ifindex, (name, _))| (*ifindex, name.as_str()))
    }
}

/// Returns the index of an interface that can be an uplink: an Ethernet device with a sufficient MTU.
fn check(name: &str) -> Result<u32, IsolationError> {
    let unusable = |e| {
        unsuitable(
            format!("the uplink {name} cannot be used: {e}"),
            "name another interface",
        )
    };
    let ifindex = device::index(name).map_err(unusable)?;
    device::hardware_address(name).map_err(unusable)?;
    let mtu = device::mtu(name).map_err(|e| system(format!("read the MTU of {name}"), e))?;
    if mtu < MIN_MTU {
        return Err(unsuitable(
            format!("the MTU of the uplink {name} is {mtu}"),
            format!("ip link set {name} mtu {MIN_MTU} (or more), or name another uplink"),
        ));
    }
    Ok(ifindex)
}

/// The first usable address of each family on a device. The MTU is left at 0.
fn outside_addresses(all: &[Assigned], ifindex: u32) -> Uplink {
    let first = |v4: bool| {
        let mine = |a: &&Assigned| a.ifindex == ifindex && a.usable && a.address.is_ipv4() == v4;
        let found = all.iter().find(mine);
        found.map(|a| a.address.into()).unwrap_or_default()
    };
    Uplink {
        local4: first(true),
        local6: first(false),
        mtu: 0,
    }
}
