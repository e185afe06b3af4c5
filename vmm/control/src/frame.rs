//! Frames of the control socket: a 12-byte header and a JSON body.
//!
//! ```text
//! offset 0  magic  "CVMC"          4 bytes
//!        4  version, little-endian 2 bytes
//!        6  zero                   2 bytes
//!        8  body length, LE        4 bytes, at most 1 MiB
//! ```
//! The version is checked before the body is read, and the length before memory is allocated.

use std::{
    io::{self, IoSlice, IoSliceMut, Read},
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};

use nix::sys::socket::{self, ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use serde::{Serialize, de::DeserializeOwned};

/// Version of the header and of the messages.
pub const VERSION: u16 = 2;
/// Limit on descriptors that accompany one frame.
pub const MAX_FILES: usize = 24;
/// Longest body in bytes.
pub const MAX_BODY: usize = 1 << 20;
const MAGIC: [u8; 4] = *b"CVMC";
/// Length of a header in bytes.
pub const HEADER: usize = 12;

/// Why a frame could not be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The peer closed the socket between frames.
    #[error("the peer closed the control socket")]
    Closed,
    /// The first bytes are not the magic.
    #[error("not a control frame: it begins with {0:02x?}")]
    Magic([u8; 4]),
    #[error("control frame has version {0}, this program supports {VERSION}")]
    Version(u16),
    #[error("control frame has a body of {0} bytes, the limit is {MAX_BODY}")]
    TooLong(usize),
    #[error("cannot parse the body of a control frame")]
    Body(#[source] serde_json::Error),
    /// The body names a different number of descriptors than were received, or names a role twice.
    #[error(
        "a control frame names {named} descriptors and {came} were received, or a role is named twice"
    )]
    Files { named: usize, came: usize },
    #[error("the control socket failed")]
    Io(#[source] io::Error),
}

/// The header for a body of `len` bytes.
fn header(len: usize) -> Result<[u8; HEADER], FrameError> {
    let len32 = u32::try_from(len)
        .ok()
        .filter(|_| len <= MAX_BODY)
        .ok_or(FrameError::TooLong(len))?;
    let mut h = [0; HEADER];
    h[..4].copy_from_slice(&MAGIC);
    h[4..6].copy_from_slice(&VERSION.to_le_bytes());
    h[8..].copy_from_slice(&len32.to_le_bytes());
    Ok(h)
}

/// Checks a header and returns the length of the body in bytes.
///
/// # Errors
/// Returns [`FrameError::Magic`], [`FrameError::Version`] or [`FrameError::TooLong`], checked in this order.
pub fn check_header(h: &[u8; HEADER]) -> Result<usize, FrameError> {
    let [m0, m1, m2, m3, v0, v1, _, _, l0, l1, l2, l3] = *h;
    if [m0, m1, m2, m3] != MAGIC {
        return Err(FrameError::Magic([m0, m1, m2, m3]));
    }
    let version = u16::from_le_bytes([v0, v1]);
    if version != VERSION {
        return Err(FrameError::Version(version));
    }
    let len = usize::try_from(u32::from_le_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
    if len > MAX_BODY {
        return Err(FrameError::TooLong(len));
    }
    Ok(len)
}

/// Encodes a whole frame, for callers that send it themselves.
///
/// # Errors
/// Returns [`FrameError::TooLong`] if the body is too long, and [`FrameError::Body`] if the message cannot be
/// serialized.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let body = serde_json::to_vec(message).map_err(FrameError::Body)?;
    let mut bytes = header(body.len())?.to_vec();
    bytes.extend_from_slice(&body);
    Ok(bytes)
}

/// Sends one message and its descriptors.
///
/// # Errors
/// Returns the errors of [`encode`], and [`FrameError::Io`] if the socket fails.
pub fn send<T: Serialize>(
    socket: &UnixStream,
    message: &T,
    fds: &[BorrowedFd<'_>],
) -> Result<(), FrameError> {
    let bytes = encode(message)?;
    let mut rest = &bytes[..];
    let mut fds: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    while !rest.is_empty() {
        match send_some(socket.as_raw_fd(), rest, &fds) {
            Ok(n) => {
                rest = &rest[n..];
                fds.clear();
            }
            Err(nix::errno::Errno::EINTR) => {}
            Err(e) => return Err(FrameError::Io(e.into())),
        }
    }
    Ok(())
}

/// Uses `send` when there are no descriptors: the VMM's seccomp filter does not allow `sendmsg`.
fn send_some(socket: RawFd, bytes: &[u8], fds: &[RawFd]) -> nix::Result<usize> {
    if fds.is_empty() {
        return socket::send(socket, bytes, MsgFlags::MSG_NOSIGNAL);
    }
    let rights = [ControlMessage::ScmRights(fds)];
    let bytes = [IoSlice::new(bytes)];
    sendmsg::<()>(socket, &bytes, &rights, MsgFlags::MSG_NOSIGNAL, None)
}

/// Receives one message and its descriptors. Blocks according to the socket's timeout.
///
/// # Errors
/// Returns [`FrameError::Closed`] if the peer closed the socket between frames, and the other variants for invalid
/// frames.
pub fn receive<T: DeserializeOwned>(socket: &UnixStream) -> Result<(T, Vec<OwnedFd>), FrameError> {
    receive_by(socket, None)
}

/// Like [`receive`], but limits the time for the whole message. `None`: the socket's own timeout applies to each read.
///
/// # Errors
/// Returns the errors of [`receive`], and [`FrameError::Io`] if the message is not complete within `time`.
pub fn receive_within<T: DeserializeOwned>(
    socket: &UnixStream,
    time: Option<Duration>,
) -> Result<(T, Vec<OwnedFd>), FrameError> {
    receive_by(socket, time.map(|time| Instant::now() + time))
}

/// Sets the socket's read timeout to the time left until `end`.
fn wait_until(socket: &UnixStream, end: Option<Instant>) -> Result<(), FrameError> {
    let Some(end) = end else {
        return Ok(());
    };
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(FrameError::Io(io::ErrorKind::TimedOut.into()));
    }
    socket.set_read_timeout(Some(left)).map_err(FrameError::Io)
}

fn receive_by<T: DeserializeOwned>(
    socket: &UnixStream,
    end: Option<Instant>,
) -> Result<(T, Vec<OwnedFd>), FrameError> {
    let mut h = [0; HEADER];
    wait_until(socket, end)?;
    let (mut got, fds) = receive_first(socket, &mut h)?;
    while got < HEADER {
        wait_until(socket, end)?;
        got += read_some(socket, &mut h[got..])?;
    }
    let mut body = vec![0; check_header(&h)?];
    let mut at = 0;
    while at < body.len() {
        wait_until(socket, end)?;
        at += read_some(socket, &mut body[at..])?;
    }
    serde_json::from_slice(&body)
        .map(|message| (message, fds))
        .map_err(FrameError::Body)
}

/// Receives the first bytes of a header. Descriptors are accepted only with these bytes.
fn receive_first(
    socket: &UnixStream,
    h: &mut [u8; HEADER],
) -> Result<(usize, Vec<OwnedFd>), FrameError> {
    let mut space = nix::cmsg_space!([RawFd; MAX_FILES]);
    loop {
        let mut iov = [IoSliceMut::new(h)];
        let message = match recvmsg::<()>(
            socket.as_raw_fd(),
            &mut iov,
            Some(&mut space),
            MsgFlags::MSG_CMSG_CLOEXEC,
        ) {
            Ok(m) => m,
            Err(nix::errno::Errno::EINTR) => continue,
            Err(e) => return Err(FrameError::Io(e.into())),
        };
        let n = message.bytes;
        if n == 0 {
            return Err(FrameError::Closed);
        }
        let mut fds = Vec::new();
        for c in message.cmsgs().map_err(|e| FrameError::Io(e.into()))? {
            if let ControlMessageOwned::ScmRights(raw) = c {
                fds.extend(raw.into_iter().map(sys::own));
            }
        }
        return Ok((n, fds));
    }
}

fn read_some(mut socket: &UnixStream, buf: &mut [u8]) -> Result<usize, FrameError> {
    loop {
        match socket.read(buf) {
            Ok(0) => return Err(FrameError::Io(io::ErrorKind::UnexpectedEof.into())),
            Ok(n) => return Ok(n),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(FrameError::Io(e)),
        }
    }
}

#[path = "sys.rs"]
mod sys;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{io::Write, os::fd::AsFd};

    #[test]
    fn descriptors_travel_beside_their_frame_in_order() {
        let (a, b) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        send(&a, &"hello", &[a.as_fd(), file.as_fd()]).unwrap();
        let (text, mut fds): (String, _) = receive(&b).unwrap();
        assert_eq!(text, "hello");
        assert_eq!(fds.len(), 2);
        let mut file = std::fs::File::from(fds.remove(1));
        file.write_all(b"x").unwrap();
    }

    #[test]
    fn a_peer_that_sends_byte_by_byte_does_not_get_more_time() {
        let (a, mut b) = UnixStream::pair().unwrap();
        let bytes = encode(&"x".repeat(100_000)).unwrap();
        let writer = std::thread::spawn(move || {
            let mut pieces = bytes.chunks(1);
            // Ends when the reader has closed its side.
            while pieces
                .next()
                .is_some_and(|piece| b.write_all(piece).is_ok())
            {
                std::thread::park_timeout(Duration::from_millis(5));
            }
        });
        let got = receive_within::<String>(&a, Some(Duration::from_millis(200)));
        assert!(matches!(got, Err(FrameError::Io(_))), "{got:?}");
        drop(a);
        writer.join().unwrap();
    }

    #[test]
    fn a_close_between_frames_and_one_inside_a_frame_are_different_errors() {
        let (a, b) = UnixStream::pair().unwrap();
        drop(a);
        assert!(matches!(receive::<String>(&b), Err(FrameError::Closed)));
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(b"CVMC").unwrap();
        drop(a);
        assert!(matches!(receive::<String>(&b), Err(FrameError::Io(_))));
    }

    proptest! {
        #[test]
        fn hostile_headers_never_pass_the_limits(h: [u8; HEADER]) {
            if let Ok(len) = check_header(&h) {
                prop_assert!(len <= MAX_BODY);
                prop_assert_eq!(&h[..4], b"CVMC");
            }
        }

        #[test]
        fn a_sent_frame_is_received_unchanged(text in ".{0,2000}") {
            let (a, b) = UnixStream::pair().unwrap();
            send(&a, &text, &[]).unwrap();
            let (back, fds): (String, _) = receive(&b).unwrap();
            prop_assert_eq!(back, text);
            prop_assert!(fds.is_empty());
        }
    }
}
