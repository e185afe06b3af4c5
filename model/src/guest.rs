//! The network as every guest has it. It is the same in all of them, so that snapshots carry no identity: the host
//! tells guests apart by their TAP.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Name of the network card.
pub const CARD: &str = "eth0";
/// Of the card.
pub const IPV4: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 21);
/// Its prefix length.
pub const IPV4_PREFIX: u8 = 30;
/// Gateway, and name server.
pub const GATEWAY4: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 22);
/// Of the card.
pub const IPV6: Ipv6Addr = Ipv6Addr::new(0xfdcb, 0, 0, 0, 0, 0, 0, 0x15);
/// Its prefix length.
pub const IPV6_PREFIX: u8 = 64;
/// Gateway, and name server.
pub const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfdcb, 0, 0, 0, 0, 0, 0, 0x16);
/// Of the card; the VMM gives it to every guest.
pub const MAC: [u8; 6] = [0x02, 0xcb, 0, 0, 0, 0x15];
/// Of the gateway. Guests have it from their boot on and ask nobody.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0xcb, 0, 0, 0, 0x16];
/// Of the card and of TAPs.
pub const MTU: u16 = 1500;
