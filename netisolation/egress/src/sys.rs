//! The unsafe code of this program.
#![expect(
    unsafe_code,
    reason = "the parent process passes descriptors by number, without an owner"
)]

use std::{
    io,
    net::TcpListener,
    os::{
        fd::{AsFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use egress::control::LISTENER;
use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    sys::socket::{
        AddressFamily, SockType, SockaddrLike, SockaddrStorage, getsockname, getsockopt, sockopt,
    },
};

/// The control socket.
pub(crate) fn control() -> io::Result<UnixStream> {
    let descriptor = io::stdin().as_fd().try_clone_to_owned()?;
    check(&descriptor, |family| family == AddressFamily::Unix)?;
    let control = UnixStream::from(descriptor);
    control.set_nonblocking(true)?;
    Ok(control)
}

/// Takes the listening socket. Must be called once.
pub(crate) fn listener() -> io::Result<TcpListener> {
    // SAFETY: `from_raw_fd` needs an open descriptor without another owner. The parent process opened it for this
    // process, which calls this function once, before it opens other descriptors. If the number is not open, fcntl
    // fails, and the value is forgotten. This holds until the `OwnedFd` is dropped.
    let descriptor = unsafe { OwnedFd::from_raw_fd(LISTENER) };
    if let Err(error) = fcntl(&descriptor, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)) {
        std::mem::forget(descriptor);
        return Err(error.into());
    }
    let is_inet = |family| matches!(family, AddressFamily::Inet | AddressFamily::Inet6);
    check(&descriptor, is_inet)?;
    if !getsockopt(&descriptor, sockopt::AcceptConn)? {
        return Err(io::Error::other("the socket does not listen"));
    }
    let listener = TcpListener::from(descriptor);
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn check(socket: &OwnedFd, accepts: impl Fn(AddressFamily) -> bool) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let kind = getsockopt(socket, sockopt::SockType)?;
    let address: SockaddrStorage = getsockname(socket.as_raw_fd())?;
    if kind == SockType::Stream && address.family().is_some_and(accepts) {
        Ok(())
    } else {
        Err(io::Error::other(
            "the descriptor is a different kind of socket",
        ))
    }
}
