//! The network configuration inside every guest. It is the same in all guests, so that snapshots carry no identity; the
//! host distinguishes guests by their TAP.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Name of the guest's network interface.
pub const CARD: &str = "eth0";
/// IPv4 address of the guest's interface.
pub const IPV4: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 21);
/// Prefix length of [`IPV4`].
pub const IPV4_PREFIX: u8 = 30;
/// IPv4 address of the gateway, which is also the name server.
pub const GATEWAY4: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 22);
/// IPv6 address of the guest's interface.
pub const IPV6: Ipv6Addr = Ipv6Addr::new(0xfdcb, 0, 0, 0, 0, 0, 0, 0x15);
/// Prefix length of [`IPV6`].
pub const IPV6_PREFIX: u8 = 64;
/// IPv6 address of the gateway, which is also the name server.
pub const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfdcb, 0, 0, 0, 0, 0, 0, 0x16);
/// MAC address of the guest's interface. The VMM assigns it to every guest.
pub const MAC: [u8; 6] = [0x02, 0xcb, 0, 0, 0, 0x15];
/// MAC address of the gateway. Guests have a static neighbour entry for it from boot and send no ARP or NDP request.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0xcb, 0, 0, 0, 0x16];
/// MTU of the guest's interface and of its TAP, in bytes.
pub const MTU: u16 = 1500;
