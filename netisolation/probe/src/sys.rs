//! Packet sockets: nix has no constructor of their addresses.
#![expect(
    unsafe_code,
    reason = "bind with a sockaddr_ll, recv that says where a frame came from, and headers before frames"
)]

use std::{
    io,
    mem::size_of,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
};

use nix::{
    libc,
    sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket},
};

/// A socket for all frames of all interfaces, or of the one with this index.
pub(crate) fn packet_socket(kind: SockType, interface: u32) -> io::Result<OwnedFd> {
    let fd = socket(
        AddressFamily::Packet,
        kind,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::EthAll,
    )?;
    let address = libc::sockaddr_ll {
        sll_family: u16::try_from(libc::AF_PACKET).map_err(io::Error::other)?,
        sll_protocol: u16::try_from(libc::ETH_P_ALL)
            .map_err(io::Error::other)?
            .to_be(),
        sll_ifindex: i32::try_from(interface).map_err(io::Error::other)?,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length =
        libc::socklen_t::try_from(size_of::<libc::sockaddr_ll>()).map_err(io::Error::other)?;
    // SAFETY: bind reads `length` bytes, the size of the local that the pointer is of, during the call; the
    // descriptor is owned by `fd` until the function returns.
    let done = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) };
    match done {
        0 => Ok(fd),
        _ => Err(io::Error::last_os_error()),
    }
}

/// From now on each frame has a `virtio_net_hdr` before it, both ways.
pub(crate) fn expect_headers(fd: BorrowedFd<'_>) -> io::Result<()> {
    let on: libc::c_int = 1;
    let length = libc::socklen_t::try_from(size_of::<libc::c_int>()).map_err(io::Error::other)?;
    // SAFETY: setsockopt reads `length` bytes, the size of the local that the pointer is of, during the call, for which the
    // descriptor is borrowed.
    let done = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_VNET_HDR,
            (&raw const on).cast(),
            length,
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Receives one frame, cut to `buffer`; its length there, and whether this host sent it.
pub(crate) fn receive(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, bool)> {
    // SAFETY: `sockaddr_ll` holds integers and a byte array only; zero is a value of all of them.
    let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    let mut length =
        libc::socklen_t::try_from(size_of::<libc::sockaddr_ll>()).map_err(io::Error::other)?;
    // SAFETY: recvfrom writes at most `buffer.len()` bytes to the exclusively borrowed buffer and at most `length`
    // bytes, its size, to the local address; both outlive the call, and the descriptor is borrowed for it.
    let got = unsafe {
        libc::recvfrom(
            fd.as_raw_fd(),
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            0,
            (&raw mut from).cast(),
            &raw mut length,
        )
    };
    let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    Ok((got, from.sll_pkttype == libc::PACKET_OUTGOING))
}
