//! Addresses of the host, in a namespace.

use super::world::{command, in_namespace, ip};
use crate::{Destinations, ForbiddenAddresses, Refused, is_of_this_host};

/// A host with secondary addresses, a prefix that is local as a whole, and a neighbour.
fn set_up() {
    command(&["tuntap", "add", "eth", "mode", "tap"]);
    command(&["link", "set", "eth", "up"]);
    for address in ["203.0.113.2/24", "203.0.113.3/24"] {
        command(&["addr", "add", address, "dev", "eth"]);
    }
    for address in ["2001:db8::2/64", "2001:db8::3/64"] {
        command(&["addr", "add", address, "dev", "eth", "nodad"]);
    }
    command(&["route", "add", "local", "198.51.100.0/24", "dev", "lo"]);
    command(&[
        "-6",
        "route",
        "add",
        "local",
        "2001:db8:7::/48",
        "dev",
        "lo",
    ]);
}

#[test]
fn net_secondary_addresses_and_local_prefixes_are_of_this_host() {
    in_namespace(|| {
        set_up();
        for own in [
            "203.0.113.2",
            "203.0.113.3",
            "203.0.113.255",
            "198.51.100.77",
            "2001:db8::2",
            "2001:db8::3",
            "2001:db8:7::77",
            "::ffff:203.0.113.3",
            "127.9.9.9",
            "::1",
            "0.0.0.0",
        ] {
            assert!(is_of_this_host(ip(own)).unwrap(), "{own}");
        }
        for other in ["203.0.113.4", "2001:db8::4", "192.0.2.1", "2001:db8:8::1"] {
            assert!(!is_of_this_host(ip(other)).unwrap(), "{other}");
        }
    });
}

#[test]
fn net_connections_to_the_host_need_an_exception_for_the_very_address() {
    in_namespace(|| {
        set_up();
        let exceptions = ["203.0.113.0/24", "198.51.100.77/32", "127.0.0.0/8"];
        let exceptions = exceptions.map(|block| Destinations {
            block: block.parse().unwrap(),
            access: Vec::new(),
        });
        let forbidden = ForbiddenAddresses::new(exceptions.into(), Vec::new());
        let check = |address: &str| forbidden.check_connection((ip(address), 80).into());
        for open in ["203.0.113.4", "198.51.100.77", "127.0.0.1", "192.0.2.1"] {
            assert!(check(open).is_ok(), "{open}");
        }
        for own in ["203.0.113.3", "198.51.100.76", "2001:db8:7::77"] {
            assert!(matches!(check(own), Err(Refused::Host(_))), "{own}");
        }
        assert!(matches!(check("10.0.0.1"), Err(Refused::Forbidden(_))));
    });
}
