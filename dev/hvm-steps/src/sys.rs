//! The ioctls that create a TAP and configure its address.
#![expect(unsafe_code, reason = "nix has no wrapper of these ioctls")]

use std::{
    io,
    net::{Ipv4Addr, UdpSocket},
    os::fd::{AsRawFd, BorrowedFd},
};

use nix::libc;

nix::ioctl_write_ptr_bad!(set_iff, libc::TUNSETIFF, libc::ifreq);
nix::ioctl_write_ptr_bad!(set_address, libc::SIOCSIFADDR, libc::ifreq);
nix::ioctl_write_ptr_bad!(set_mask, libc::SIOCSIFNETMASK, libc::ifreq);
nix::ioctl_write_ptr_bad!(set_flags, libc::SIOCSIFFLAGS, libc::ifreq);

fn request(name: &str) -> libc::ifreq {
    // SAFETY: `ifreq` holds only integers and byte arrays, for which zero is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero: it terminates the name.
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..room].iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request
}

/// Turns `fd`, an open /dev/net/tun, into the TAP `name` with virtio-net headers.
pub(crate) fn make_tap(fd: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let mut request = request(name);
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).unwrap_or(0);
    // SAFETY: TUNSETIFF reads one `ifreq`, a local that outlives the call; the descriptor is borrowed.
    unsafe { set_iff(fd.as_raw_fd(), &raw const request) }?;
    Ok(())
}

/// Assigns an address to an interface and brings it up.
pub(crate) fn configure(name: &str, address: Ipv4Addr, mask: Ipv4Addr) -> io::Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    let fd = socket.as_raw_fd();
    let inet = |ip: Ipv4Addr| {
        let mut data = [0; 14];
        for (to, from) in data[2..6].iter_mut().zip(ip.octets()) {
            *to = from.cast_signed();
        }
        libc::sockaddr {
            sa_family: libc::sa_family_t::try_from(libc::AF_INET).unwrap_or(0),
            sa_data: data,
        }
    };
    let mut request = request(name);
    request.ifr_ifru.ifru_addr = inet(address);
    // SAFETY: each of the three ioctls reads one `ifreq`, a local that outlives the calls, whose union holds the member
    // that the ioctl reads; the socket is open until the function returns.
    unsafe {
        set_address(fd, &raw const request)?;
        request.ifr_ifru.ifru_netmask = inet(mask);
        set_mask(fd, &raw const request)?;
        let flags = libc::IFF_UP | libc::IFF_RUNNING;
        request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).unwrap_or(0);
        set_flags(fd, &raw const request)?;
    }
    Ok(())
}
