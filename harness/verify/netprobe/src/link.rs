//! Packet sockets, which send and receive raw frames on an interface.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use nix::{
    net::if_::if_nametoindex,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{MsgFlags, SockType, send, setsockopt, sockopt::RcvBufForce},
};

use crate::sys;

/// Size of the receive buffer, in bytes.
const RECEIVE_BUFFER: usize = 32 << 20;
/// Received frames are cut to this length, in bytes.
const MAX_FRAME: usize = 2048;

/// The first header of sent and received frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    Ethernet,
    Ip,
}

/// A packet socket.
#[derive(Debug)]
pub struct Link(OwnedFd);

impl Link {
    /// Opens a socket on an interface. Needs CAP_NET_RAW.
    ///
    /// # Errors
    /// Returns an error if the interface does not exist or the capability is missing.
    pub fn open(interface: &str, layer: Layer) -> io::Result<Self> {
        let kind = match layer {
            Layer::Ethernet => SockType::Raw,
            Layer::Ip => SockType::Datagram,
        };
        let fd = sys::packet_socket(kind, if_nametoindex(interface)?)?;
        // Needs CAP_NET_ADMIN. Without it the default size stays.
        let _ = setsockopt(&fd, RcvBufForce, &RECEIVE_BUFFER);
        Ok(Self(fd))
    }

    /// Opens a socket on which an offload header ([`crate::offload::Header`]) precedes every frame. The driver receives
    /// the header unchanged.
    ///
    /// # Errors
    /// Returns an error under the conditions of [`Link::open`].
    pub fn open_with_headers(interface: &str) -> io::Result<Self> {
        let link = Self::open(interface, Layer::Ethernet)?;
        sys::expect_headers(link.0.as_fd())?;
        Ok(link)
    }

    /// Sends a frame.
    ///
    /// # Errors
    /// Returns an error if the interface is down or the frame is too long.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        send(self.0.as_raw_fd(), frame, MsgFlags::empty())?;
        Ok(())
    }

    /// Receives the next frame that this host did not send. `None`: no frame arrived before the deadline.
    ///
    /// # Errors
    /// Returns an error if the interface is removed or goes down.
    pub fn receive(&self, deadline: Instant) -> io::Result<Option<Vec<u8>>> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = left.min(Duration::from_secs(60)).as_millis();
            let left = PollTimeout::try_from(left).map_err(io::Error::other)?;
            let mut wait = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
            match poll(&mut wait, left) {
                Ok(0) if Instant::now() >= deadline => return Ok(None),
                Ok(0) | Err(nix::errno::Errno::EINTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
            let mut frame = vec![0; MAX_FRAME];
            let (length, own) = sys::receive(self.0.as_fd(), &mut frame)?;
            frame.truncate(length);
            if !own {
                return Ok(Some(frame));
            }
        }
    }
}
