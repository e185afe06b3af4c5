//! A tap on an interface: all its frames, both ways, before and after the stack.

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

/// Room for frames that wait, in bytes.
const ROOM: usize = 32 << 20;
/// Longest part of a frame that is kept.
const FRAME: usize = 2048;

/// What frames begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// The Ethernet header.
    Ethernet,
    /// The IP header.
    Ip,
}

/// A packet socket.
#[derive(Debug)]
pub struct Link(OwnedFd);

impl Link {
    /// On this interface. Needs CAP_NET_RAW.
    ///
    /// # Errors
    /// There is no such interface, or the capability is missing.
    pub fn open(interface: &str, layer: Layer) -> io::Result<Self> {
        let kind = match layer {
            Layer::Ethernet => SockType::Raw,
            Layer::Ip => SockType::Datagram,
        };
        let fd = sys::packet_socket(kind, if_nametoindex(interface)?)?;
        // Without the capability for it the usual room has to do.
        let _ = setsockopt(&fd, RcvBufForce, &ROOM);
        Ok(Self(fd))
    }

    /// The same for frames with a header before them ([`crate::offload::Header`]), which the driver gets as it is.
    ///
    /// # Errors
    /// As [`Link::open`].
    pub fn open_unfinished(interface: &str) -> io::Result<Self> {
        let link = Self::open(interface, Layer::Ethernet)?;
        sys::expect_headers(link.0.as_fd())?;
        Ok(link)
    }

    /// Sends a whole frame.
    ///
    /// # Errors
    /// The interface is down, or the frame is too long.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        send(self.0.as_raw_fd(), frame, MsgFlags::empty())?;
        Ok(())
    }

    /// The next frame that others sent; `None` when there is none until the deadline.
    ///
    /// # Errors
    /// The interface went away or down.
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
            let mut frame = vec![0; FRAME];
            let (length, own) = sys::receive(self.0.as_fd(), &mut frame)?;
            frame.truncate(length);
            if !own {
                return Ok(Some(frame));
            }
        }
    }
}
