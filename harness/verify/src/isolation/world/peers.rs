//! Echo servers at every address: a guest that reaches one gets a response.

use std::{
    collections::BTreeSet,
    io::{self, IoSlice, IoSliceMut, Read, Write},
    net::{Ipv6Addr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsRawFd,
    thread,
};

use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrIn6, recvmsg, sendmsg, setsockopt,
    sockopt::Ipv6RecvPacketInfo,
};

/// Listens at these ports, for TCP and UDP over both families, in the network namespace of this thread. The threads run
/// until the process exits.
pub(super) fn serve(ports: &BTreeSet<u16>) -> io::Result<()> {
    for port in ports {
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, *port))?;
        thread::spawn(move || accept(&listener, echo));
        let socket = datagrams(*port)?;
        thread::spawn(move || answer(&socket, |_, bytes| Some(bytes.to_vec())));
    }
    Ok(())
}

/// A datagram socket that reports the local address of each datagram.
pub(super) fn datagrams(port: u16) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port))?;
    setsockopt(&socket, Ipv6RecvPacketInfo, &true)?;
    Ok(socket)
}

/// Serves each connection on its own thread.
pub(super) fn accept(listener: &TcpListener, serve: fn(TcpStream) -> io::Result<()>) {
    for stream in listener.incoming().flatten() {
        // The guest's probe reports a failure.
        thread::spawn(move || serve(stream));
    }
}

fn echo(mut stream: TcpStream) -> io::Result<()> {
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            length => stream.write_all(&buffer[..length])?,
        }
    }
}

/// Responds to each datagram from the address that it was sent to.
pub(super) fn answer(
    socket: &UdpSocket,
    mut reply: impl FnMut(SockaddrIn6, &[u8]) -> Option<Vec<u8>>,
) {
    let mut buffer = vec![0; 4096];
    let mut control = nix::cmsg_space!(nix::libc::in6_pktinfo);
    loop {
        let mut parts = [IoSliceMut::new(&mut buffer)];
        let fd = socket.as_raw_fd();
        let Ok(got) = recvmsg::<SockaddrIn6>(fd, &mut parts, Some(&mut control), MsgFlags::empty())
        else {
            continue;
        };
        let information = got.cmsgs().ok().and_then(|mut all| {
            all.find_map(|one| match one {
                ControlMessageOwned::Ipv6PacketInfo(information) => Some(information),
                _ => None,
            })
        });
        let (length, from) = (got.bytes, got.address);
        let (Some(from), Some(mut information)) = (from, information) else {
            continue;
        };
        let Some(out) = reply(from, &buffer[..length]) else {
            continue;
        };
        // Let routing choose the interface.
        information.ipi6_ifindex = 0;
        let control = [ControlMessage::Ipv6PacketInfo(&information)];
        // The guest's probe reports a missing response.
        let _ = sendmsg(
            fd,
            &[IoSlice::new(&out)],
            &control,
            MsgFlags::empty(),
            Some(&from),
        );
    }
}
