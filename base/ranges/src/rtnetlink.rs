//! Requests of rtnetlink(7), for the network namespace of this thread.

use std::{io, os::fd::AsRawFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};

/// Sends a request and returns the beginning of the response.
///
/// # Errors
/// Returns the error of the system call that failed.
pub fn request(message: &[u8]) -> io::Result<Vec<u8>> {
    let kind = (
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
    );
    let socket = socket(kind.0, kind.1, kind.2, SockProtocol::NetlinkRoute)?;
    send(socket.as_raw_fd(), message, MsgFlags::empty())?;
    let mut answer = vec![0; 128];
    let length = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    answer.truncate(length);
    Ok(answer)
}

/// Reads an acknowledgement: `nlmsghdr`, then `nlmsgerr`, which begins with the negated errno.
///
/// # Errors
/// Returns the kernel's error, or [`io::ErrorKind::UnexpectedEof`] if the response is too short.
pub fn acknowledgement(answer: &[u8]) -> io::Result<()> {
    match answer.get(16..20) {
        Some(&[0, 0, 0, 0]) => Ok(()),
        Some(&[a, b, c, d]) => Err(io::Error::from_raw_os_error(
            i32::from_ne_bytes([a, b, c, d]).saturating_neg(),
        )),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
