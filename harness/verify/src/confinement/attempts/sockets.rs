//! Sockets: path and abstract Unix sockets, network sockets, and sockets to the kernel.

use std::os::unix::ffi::OsStrExt;

use nix::libc;

use super::attempt::{Attempt, Class, USUAL, changed_if, no_change, staged};
use crate::confinement::{
    calls::{length, loopback, mapped_loopback, unix_address},
    intruder::{Intruder, Try},
    scene::abstract_name,
};

const CONNECT: (&str, i64) = ("connect", libc::SYS_connect);
const BIND: (&str, i64) = ("bind", libc::SYS_bind);

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "socket-path",
        class: Class::Sockets,
        why: "Container engines and other servers listen at paths that many users may use.",
        refusals: USUAL,
        act: |i, s| connect(i, s.path("listener").as_os_str().as_bytes()),
        look: |s, _| changed_if(s.listener.accept().is_ok(), "a connection arrived"),
    },
    Attempt {
        name: "socket-abstract",
        class: Class::Sockets,
        why: "File permissions do not protect an abstract socket.",
        refusals: USUAL,
        act: |i, _| connect(i, &abstract_bytes("")),
        look: |s, _| changed_if(s.abstract_listener.accept().is_ok(), "a connection arrived"),
    },
    Attempt {
        name: "socket-datagram",
        class: Class::Sockets,
        why: "System logs and service managers accept datagrams.",
        refusals: USUAL,
        act: |i, s| {
            let socket = i.socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0)?;
            let address = unix_address(s.path("datagrams").as_os_str().as_bytes());
            send_to(i, socket, &address)
        },
        look: |s, _| {
            let came = s.datagrams.recv(&mut [0; 8]).is_ok();
            changed_if(came, "a datagram arrived")
        },
    },
    Attempt {
        name: "socket-neighbours-agent",
        class: Class::Sockets,
        why: "The agent behind this socket runs any command in another sandbox.",
        refusals: USUAL,
        act: |i, s| {
            let path = staged(s.victim())?.clone.vsock();
            connect(i, path.as_os_str().as_bytes())
        },
        look: no_change,
    },
    Attempt {
        name: "socket-tcp",
        class: Class::Sockets,
        why: "Services of the host listen on its loopback interface.",
        refusals: USUAL,
        act: |i, s| {
            let port = staged(s.tcp.local_addr())?.port();
            let socket = i.socket(libc::AF_INET, libc::SOCK_STREAM, 0)?;
            i.with_address(CONNECT, socket, &loopback(port)).map(|_| ())
        },
        look: |s, _| changed_if(s.tcp.accept().is_ok(), "a connection arrived"),
    },
    Attempt {
        name: "socket-tcp-mapped",
        class: Class::Sockets,
        why: "An IPv6 socket reaches services that listen on IPv4.",
        refusals: USUAL,
        act: |i, s| {
            let port = staged(s.tcp.local_addr())?.port();
            let socket = i.socket(libc::AF_INET6, libc::SOCK_STREAM, 0)?;
            i.with_address(CONNECT, socket, &mapped_loopback(port))
                .map(|_| ())
        },
        look: |s, _| changed_if(s.tcp.accept().is_ok(), "a connection arrived"),
    },
    Attempt {
        name: "socket-udp",
        class: Class::Sockets,
        why: "The sandbox's policy does not apply to datagrams that the VMM itself sends.",
        refusals: USUAL,
        act: |i, s| {
            let port = staged(s.udp.local_addr())?.port();
            let socket = i.socket(libc::AF_INET, libc::SOCK_DGRAM, 0)?;
            send_to(i, socket, &loopback(port))
        },
        look: |s, _| changed_if(s.udp.recv(&mut [0; 8]).is_ok(), "a datagram arrived"),
    },
    Attempt {
        name: "socket-packet",
        class: Class::Sockets,
        why: "A packet socket receives and sends any frame of the host.",
        refusals: USUAL,
        act: |i, _| {
            // ETH_P_ALL in network byte order.
            i.socket(libc::AF_PACKET, libc::SOCK_RAW, 0x0300)
                .map(|_| ())
        },
        look: no_change,
    },
    Attempt {
        name: "socket-raw",
        class: Class::Sockets,
        why: "A raw socket sends packets with forged sender addresses.",
        refusals: USUAL,
        act: |i, _| {
            i.socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP)
                .map(|_| ())
        },
        look: no_change,
    },
    Attempt {
        name: "socket-netlink",
        class: Class::Sockets,
        why: "Netlink sockets change routes, addresses and devices.",
        refusals: USUAL,
        act: |i, _| {
            i.socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE)
                .map(|_| ())
        },
        look: no_change,
    },
    Attempt {
        name: "socket-listen-at-path",
        class: Class::Sockets,
        why: "The VMM could answer clients of another sandbox's socket.",
        refusals: USUAL,
        act: |i, s| {
            let socket = i.socket(libc::AF_UNIX, libc::SOCK_STREAM, 0)?;
            let path = s.path("public/vsock.sock");
            let address = unix_address(path.as_os_str().as_bytes());
            i.with_address(BIND, socket, &address).map(|_| ())
        },
        look: |s, _| {
            let there = s.path("public/vsock.sock").exists();
            changed_if(there, "the socket exists")
        },
    },
    Attempt {
        name: "socket-listen-at-abstract",
        class: Class::Sockets,
        why: "Sandboxes could communicate through an abstract socket.",
        refusals: USUAL,
        act: |i, _| {
            let socket = i.socket(libc::AF_UNIX, libc::SOCK_STREAM, 0)?;
            let address = unix_address(&abstract_bytes("-met"));
            i.with_address(BIND, socket, &address)?;
            i.attempt("listen", libc::SYS_listen, &[socket, 1])
        },
        look: no_change,
    },
];

fn abstract_bytes(end: &str) -> Vec<u8> {
    let mut name = vec![0];
    name.extend(abstract_name());
    name.extend(end.bytes());
    name
}

fn connect(i: &mut Intruder, name: &[u8]) -> Try<()> {
    let socket = i.socket(libc::AF_UNIX, libc::SOCK_STREAM, 0)?;
    i.with_address(CONNECT, socket, &unix_address(name))
        .map(|_| ())
}

fn send_to(i: &mut Intruder, socket: i64, address: &[u8]) -> Try<()> {
    let data = i.put(b"out")?;
    let to = i.put(address)?;
    let arguments = [socket, data, 3, 0, to, length(address)?];
    i.attempt("sendto", libc::SYS_sendto, &arguments)
}
