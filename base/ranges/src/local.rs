//! Connections that this host makes for a client: to a webhook, a registry, a DNS server, a proxy, or through the
//! egress proxy. They must not reach services of the host itself or its neighbours.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use nix::libc;

use crate::{ForbiddenAddresses, rtnetlink};

/// Sizes of `nlmsghdr` and `rtmsg` (`linux/netlink.h`, `linux/rtnetlink.h`).
const HEADER: usize = 16;
const RTMSG: usize = 12;
/// Offset of the message's type in `nlmsghdr`, and of the route's type after it in `rtmsg`.
const MESSAGE_TYPE: usize = 4;
const ROUTE_TYPE: usize = HEADER + 7;

/// Reason for refusing a connection that the host would make for a client.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error("{0} is in a forbidden range")]
    Forbidden(IpAddr),
    #[error("{0} is an address of this host")]
    Host(IpAddr),
    #[error("cannot look up the route to {0}")]
    Route(IpAddr, #[source] io::Error),
}

impl ForbiddenAddresses {
    /// Checks a TCP connection that the host is about to make for a client. Must be called just before it. Addresses of
    /// this host are refused, unless an exception names exactly this address, or contains it in the loopback range.
    ///
    /// # Errors
    /// Returns the reason for a refusal. If the kernel does not respond, the connection is refused.
    pub fn check_connection(&self, to: SocketAddr) -> Result<(), Refused> {
        if self.forbids_tcp(to) {
            return Err(Refused::Forbidden(to.ip()));
        }
        match is_of_this_host(to.ip()) {
            Ok(true) if !self.opens_host(to) => Err(Refused::Host(to.ip())),
            Ok(_) => Ok(()),
            Err(error) => Err(Refused::Route(to.ip(), error)),
        }
    }
}

/// Whether packets to an address are delivered to this host. The kernel decides by its routing tables, so secondary
/// addresses, prefixes with a `local` route and broadcast addresses count. An address without a route does not.
///
/// # Errors
/// Returns an error if the kernel does not respond.
pub fn is_of_this_host(address: IpAddr) -> io::Result<bool> {
    match route_type(address.to_canonical()) {
        Ok(
            libc::RTN_UNICAST | libc::RTN_BLACKHOLE | libc::RTN_UNREACHABLE | libc::RTN_PROHIBIT,
        ) => Ok(false),
        Ok(_) => Ok(true),
        Err(error) => match error.raw_os_error() {
            Some(libc::ENETUNREACH | libc::EHOSTUNREACH) => Ok(false),
            _ => Err(error),
        },
    }
}

/// Requests the route of packets to an address: `RTM_GETROUTE` with the attribute `RTA_DST`.
fn route_type(address: IpAddr) -> io::Result<u8> {
    let (family, bytes) = match address {
        IpAddr::V4(v4) => (libc::AF_INET, v4.octets().to_vec()),
        IpAddr::V6(v6) => (libc::AF_INET6, v6.octets().to_vec()),
    };
    let bits = u8::try_from(bytes.len() * 8).map_err(io::Error::other)?;
    let attribute = u16::try_from(4 + bytes.len()).map_err(io::Error::other)?;
    let length = u32::try_from(HEADER + RTMSG + 4 + bytes.len()).map_err(io::Error::other)?;
    let mut message = Vec::with_capacity(64);
    message.extend(length.to_ne_bytes());
    message.extend(libc::RTM_GETROUTE.to_ne_bytes());
    message.extend(
        u16::try_from(libc::NLM_F_REQUEST)
            .map_err(io::Error::other)?
            .to_ne_bytes(),
    );
    message.extend([0; 8]);
    message.extend([u8::try_from(family).map_err(io::Error::other)?, bits]);
    message.extend([0; RTMSG - 2]);
    message.extend(attribute.to_ne_bytes());
    message.extend(libc::RTA_DST.to_ne_bytes());
    message.extend(bytes);
    route_type_of(&rtnetlink::request(&message)?)
}

/// Reads the type of the route in a response, or the error.
fn route_type_of(answer: &[u8]) -> io::Result<u8> {
    let kind = answer.get(MESSAGE_TYPE..MESSAGE_TYPE + 2);
    if kind != Some(&libc::RTM_NEWROUTE.to_ne_bytes()) {
        rtnetlink::acknowledgement(answer)?;
        return Err(io::ErrorKind::InvalidData.into());
    }
    answer
        .get(ROUTE_TYPE)
        .copied()
        .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}
