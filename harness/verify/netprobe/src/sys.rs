//! Packet sockets (packet(7)). nix cannot construct their addresses.
#![expect(
    unsafe_code,
    reason = "bind and recvfrom with a sockaddr_ll, and PACKET_VNET_HDR, have no safe wrappers"
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

/// Opens a socket for all frames of the interface with this index. 0: of all interfaces.
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
    // SAFETY: bind reads `length` bytes, the size of `address`, during the call; `fd` owns the descriptor until the
    // function returns.
    let done = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) };
    match done {
        0 => Ok(fd),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes a `virtio_net_hdr` precede every sent and received frame.
pub(crate) fn expect_headers(fd: BorrowedFd<'_>) -> io::Result<()> {
    let on: libc::c_int = 1;
    let length = libc::socklen_t::try_from(size_of::<libc::c_int>()).map_err(io::Error::other)?;
    // SAFETY: setsockopt reads `length` bytes, the size of `on`, during the call, for which the descriptor is borrowed.
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

/// Receives one frame and cuts it to the size of `buffer`. Returns its length there, and whether this host sent it.
pub(crate) fn receive(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, bool)> {
    // SAFETY: `sockaddr_ll` consists of integers and a byte array, for which zero is a valid value.
    let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    let mut length =
        libc::socklen_t::try_from(size_of::<libc::sockaddr_ll>()).map_err(io::Error::other)?;
    // SAFETY: recvfrom writes at most `buffer.len()` bytes to the exclusively borrowed buffer, and at most `length`
    // bytes, the size of `from`, to `from`; both outlive the call, for which the descriptor is borrowed.
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
