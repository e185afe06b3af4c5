//! The network card of the guest: down, or up with the addresses that every guest has ([`model::guest`]).
//!
//! The card stays down until `POST /init` enables the network, so programs of a guest without a network get
//! "network is unreachable" at once. Neighbour entries of the gateways are permanent; ARP, neighbour discovery,
//! router advertisements and generated addresses are disabled. An idle guest therefore sends nothing. The kernel
//! applies each rtnetlink(7) message before it acknowledges it, so the settings are effective when `/init` is
//! answered.

use std::{
    fs, io,
    net::IpAddr,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
};

use model::guest;
use nix::{
    net::if_::if_nametoindex,
    sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket},
};

/// IPv6 settings of the card, written before it is first brought up: (file, value).
const QUIET: [(&str, &str); 5] = [
    ("accept_ra", "0"),
    ("autoconf", "0"),
    ("router_solicitations", "0"),
    ("accept_dad", "0"),
    // No link-local address from the hardware address (IN6_ADDR_GEN_MODE_NONE).
    ("addr_gen_mode", "1"),
];
/// `NLMSG_HDRLEN`.
const HEADER: usize = 16;
/// `IFA_F_NODAD`, linux/if_addr.h.
const NO_DETECTION: u8 = 0x02;

/// Disables IPv6 autoconfiguration of the card. Does nothing without a card or without IPv6.
pub(crate) fn quieten() -> io::Result<()> {
    let dir = Path::new("/proc/sys/net/ipv6/conf").join(guest::CARD);
    if !dir.exists() {
        return Ok(());
    }
    QUIET
        .iter()
        .try_for_each(|(file, value)| fs::write(dir.join(file), value))
}

/// Brings the card up and adds its addresses, routes and neighbours, or brings it down, which makes the kernel remove
/// routes and neighbours.
pub(crate) fn switch(on: bool) -> io::Result<()> {
    let card = if_nametoindex(guest::CARD)?;
    let mut requests = Requests::default();
    requests.link(card, on);
    if on {
        let sides = [
            (
                guest::IPV4.into(),
                guest::IPV4_PREFIX,
                guest::GATEWAY4.into(),
            ),
            (
                guest::IPV6.into(),
                guest::IPV6_PREFIX,
                guest::GATEWAY6.into(),
            ),
        ];
        for (own, prefix, gateway) in sides {
            requests.address(card, own, prefix);
            requests.neighbour(card, gateway);
            requests.default_route(card, gateway);
        }
    }
    requests.perform()
}

/// Netlink messages, which the kernel handles in order.
#[derive(Debug, Default)]
struct Requests {
    bytes: Vec<u8>,
    count: u32,
}

impl Requests {
    fn link(&mut self, card: u32, on: bool) {
        let flags = |set| {
            if set {
                libc::IFF_UP | libc::IFF_NOARP
            } else {
                0
            }
        };
        let changed = if on { flags(true) } else { libc::IFF_UP };
        let mut body = vec![0; 4];
        body.extend(card.to_ne_bytes());
        body.extend(flags(on).to_ne_bytes());
        body.extend(changed.to_ne_bytes());
        attribute(
            &mut body,
            libc::IFLA_MTU,
            &u32::from(guest::MTU).to_ne_bytes(),
        );
        self.add(libc::RTM_NEWLINK, 0, &body);
    }

    fn address(&mut self, card: u32, own: IpAddr, prefix: u8) {
        // struct ifaddrmsg with scope 0 (RT_SCOPE_UNIVERSE).
        let mut body = vec![family(own), prefix, NO_DETECTION, 0];
        body.extend(card.to_ne_bytes());
        for kind in [libc::IFA_LOCAL, libc::IFA_ADDRESS] {
            attribute(&mut body, kind, &octets(own));
        }
        self.add(libc::RTM_NEWADDR, libc::NLM_F_REPLACE, &body);
    }

    fn neighbour(&mut self, card: u32, gateway: IpAddr) {
        // struct ndmsg.
        let mut body = vec![family(gateway), 0, 0, 0];
        body.extend(card.to_ne_bytes());
        body.extend(libc::NUD_PERMANENT.to_ne_bytes());
        body.extend([0, 0]);
        attribute(&mut body, libc::NDA_DST, &octets(gateway));
        attribute(&mut body, libc::NDA_LLADDR, &guest::GATEWAY_MAC);
        self.add(libc::RTM_NEWNEIGH, libc::NLM_F_REPLACE, &body);
    }

    fn default_route(&mut self, card: u32, gateway: IpAddr) {
        // struct rtmsg with a destination prefix of 0 bits: the default route.
        let mut body = vec![
            family(gateway),
            0,
            0,
            0,
            libc::RT_TABLE_MAIN,
            libc::RTPROT_BOOT,
            libc::RT_SCOPE_UNIVERSE,
            libc::RTN_UNICAST,
        ];
        body.extend([0; 4]);
        attribute(&mut body, libc::RTA_GATEWAY, &octets(gateway));
        attribute(&mut body, libc::RTA_OIF, &card.to_ne_bytes());
        self.add(libc::RTM_NEWROUTE, libc::NLM_F_REPLACE, &body);
    }

    fn add(&mut self, kind: u16, flags: i32, body: &[u8]) {
        self.count += 1;
        let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK | libc::NLM_F_CREATE | flags;
        let len = u32::try_from(HEADER + body.len()).unwrap_or(u32::MAX);
        self.bytes.extend(len.to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes
            .extend(u16::try_from(flags).unwrap_or_default().to_ne_bytes());
        self.bytes.extend(self.count.to_ne_bytes());
        self.bytes.extend([0; 4]);
        self.bytes.extend(body);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// Sends all messages and reads their responses. Returns the first error; the kernel still handles the later
    /// messages.
    fn perform(self) -> io::Result<()> {
        let kernel = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkRoute,
        )?;
        send(kernel.as_raw_fd(), &self.bytes, MsgFlags::empty())?;
        (0..self.count).try_for_each(|_| answer(&kernel))
    }
}

/// Reads one response: `NLMSG_ERROR` with an errno, 0 for success.
fn answer(kernel: &OwnedFd) -> io::Result<()> {
    let mut buffer = [0; 1024];
    let len = recv(kernel.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
    let error = buffer[..len].get(HEADER..HEADER + 4);
    let error = error.and_then(|bytes| bytes.try_into().ok());
    match error.map(i32::from_ne_bytes) {
        Some(0) => Ok(()),
        Some(errno) => Err(io::Error::from_raw_os_error(-errno)),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn family(address: IpAddr) -> u8 {
    let family = match address {
        IpAddr::V4(_) => libc::AF_INET,
        IpAddr::V6(_) => libc::AF_INET6,
    };
    u8::try_from(family).unwrap_or_default()
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// Appends a `struct rtattr` and its payload.
fn attribute(body: &mut Vec<u8>, kind: u16, payload: &[u8]) {
    let len = u16::try_from(4 + payload.len()).unwrap_or_default();
    body.extend(len.to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(payload);
    body.resize(body.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nix::sched::{CloneFlags, unshare};

    use super::*;

    fn ip(args: &str) -> String {
        let output = Command::new("ip").args(args.split(' ')).output().unwrap();
        assert!(output.status.success(), "ip {args}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn assert_has(text: &str, wanted: &[&str]) {
        for word in wanted {
            assert!(text.contains(word), "no {word:?} in {text}");
        }
    }

    #[test]
    fn net_the_card_is_set_up_and_taken_down() {
        let inside = || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            ip("link add eth0 type veth peer name far");
            ip("link set far up");
            quieten().unwrap();
            // Setting up a card that is up is not an error.
            for _ in 0..2 {
                switch(true).unwrap();
                assert_has(&ip("link show eth0"), &["UP", "NOARP", "mtu 1500"]);
                assert_has(&ip("-4 address show eth0"), &["169.254.0.21/30"]);
                let six = ip("-6 address show eth0");
                assert_has(&six, &["fdcb::15/64"]);
                assert!(!six.contains("fe80") && !six.contains("tentative"), "{six}");
                assert_has(
                    &ip("-4 route get 192.0.2.1"),
                    &["via 169.254.0.22", "src 169.254.0.21"],
                );
                assert_has(
                    &ip("-6 route get 2001:db8::1"),
                    &["via fdcb::16", "src fdcb::15"],
                );
                let neighbours = ip("neighbour show dev eth0 nud permanent");
                assert_has(
                    &neighbours,
                    &[
                        "169.254.0.22 lladdr 02:cb:00:00:00:16",
                        "fdcb::16 lladdr 02:cb:00:00:00:16",
                    ],
                );
            }
            switch(false).unwrap();
            assert_eq!(ip("route show"), "");
            let unreachable = std::net::TcpStream::connect("192.0.2.1:80").unwrap_err();
            assert_eq!(unreachable.raw_os_error(), Some(libc::ENETUNREACH));
            switch(true).unwrap();
            assert_has(&ip("-6 route get 2001:db8::1"), &["via fdcb::16"]);
        };
        std::thread::spawn(inside).join().unwrap();
    }

    #[test]
    fn net_a_missing_card_is_an_error() {
        let inside = || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            quieten().unwrap();
            assert!(switch(true).is_err());
        };
        std::thread::spawn(inside).join().unwrap();
    }
}
