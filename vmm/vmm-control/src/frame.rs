//! Frames of the control socket: a 12-byte header and a JSON body.
//!
//! ```text
//! offset 0  magic  "CVMC"                          4 bytes
//!        4  version of the body, little-endian     2 bytes
//!        6  newest version that the sender reads   2 bytes; 0: the version at offset 4
//!        8  body length, LE                        4 bytes, at most 1 MiB
//! ```
//! The header never changes. The length is checked before memory is allocated, and the version before the body is
//! parsed.
//!
//! **Versions.** A server and its VMMs can be of different releases. A client sends its first request in the oldest
//! version that it supports, and the following ones in the newest version that both support. A VMM replies in the
//! version of the request. If it does not support that version, it replies with a frame of version 0, whose body names
//! the versions that it supports, and reads the next request ([`Versions`]).
//!
//! A release may add a field to a message without a new version, under these rules. *Requests*: a VMM rejects unknown
//! fields, because ignoring one could change the meaning of the request. The field is therefore optional, its absence
//! has the old meaning, and a client leaves it out unless it needs it. *Replies*: a client ignores unknown fields. New
//! variants (requests, phases, kinds of failure) in replies need a new version.

use std::{
    fmt,
    io::{self, IoSlice, IoSliceMut, Read},
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};

use nix::sys::socket::{self, ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Version of a frame whose body is a [`Versions`] instead of a message.
const REFUSAL: u16 = 0;
/// Limit on descriptors that accompany one frame.
pub const MAX_FILES: usize = 24;
/// Longest body in bytes.
pub const MAX_BODY: usize = 1 << 20;
const MAGIC: [u8; 4] = *b"CVMC";
/// Length of a header in bytes.
pub const HEADER: usize = 12;

/// The versions of the messages that a program supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    pub oldest: u16,
    pub newest: u16,
}

impl Versions {
    /// The versions that this program supports.
    pub const OURS: Self = Self {
        oldest: 2,
        newest: 2,
    };

    #[must_use]
    pub fn contains(self, version: u16) -> bool {
        (self.oldest..=self.newest).contains(&version)
    }

    /// The newest version that both support; `None` if there is none.
    #[must_use]
    pub fn common(self, other: Self) -> Option<u16> {
        let newest = self.newest.min(other.newest);
        (newest >= self.oldest && newest >= other.oldest).then_some(newest)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.oldest, self.newest)
    }
}

/// Reasons why a frame could not be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The peer closed the socket between frames.
    #[error("the peer closed the control socket")]
    Closed,
    /// The first bytes are not the magic.
    #[error("not a control frame: it begins with {0:02x?}")]
    Magic([u8; 4]),
    /// The whole frame was read, so the next frame can be read.
    #[error("control frame has version {found}, but this program supports {ours}")]
    Version { found: u16, ours: Versions },
    /// The peer refused the version of a frame.
    #[error("the VMM supports the versions {peer} of the control protocol, this program {ours}")]
    Refused { peer: Versions, ours: Versions },
    #[error("control frame has a body of {0} bytes: the limit is {MAX_BODY}")]
    TooLong(usize),
    #[error("cannot parse the body of a control frame")]
    Body(#[source] serde_json::Error),
    /// The body names a different number of descriptors than were received, or names a role twice.
    #[error(
        "a control frame names {named} descriptors but {came} were received, or a role is named twice"
    )]
    Files { named: usize, came: usize },
    #[error("the control socket failed")]
    Io(#[source] io::Error),
}

/// The header of a frame of `version` with a body of `len` bytes, from a program that supports `ours`.
fn header(version: u16, ours: Versions, len: usize) -> Result<[u8; HEADER], FrameError> {
    let len32 = u32::try_from(len)
        .ok()
        .filter(|_| len <= MAX_BODY)
        .ok_or(FrameError::TooLong(len))?;
    let mut h = [0; HEADER];
    h[..4].copy_from_slice(&MAGIC);
    h[4..6].copy_from_slice(&version.to_le_bytes());
    h[6..8].copy_from_slice(&ours.newest.to_le_bytes());
    h[8..].copy_from_slice(&len32.to_le_bytes());
    Ok(h)
}

/// The fields of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    version: u16,
    newest: u16,
    len: usize,
}

impl Header {
    fn parse(h: &[u8; HEADER]) -> Result<Self, FrameError> {
        let [m0, m1, m2, m3, v0, v1, n0, n1, l0, l1, l2, l3] = *h;
        if [m0, m1, m2, m3] != MAGIC {
            return Err(FrameError::Magic([m0, m1, m2, m3]));
        }
        let version = u16::from_le_bytes([v0, v1]);
        let len = usize::try_from(u32::from_le_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
        if len > MAX_BODY {
            return Err(FrameError::TooLong(len));
        }
        Ok(Self {
            version,
            newest: u16::from_le_bytes([n0, n1]).max(version),
            len,
        })
    }
}

/// Checks a header and returns the length of the body in bytes.
///
/// # Errors
/// Returns [`FrameError::Magic`], [`FrameError::TooLong`] or [`FrameError::Version`], checked in this order.
pub fn check_header(h: &[u8; HEADER]) -> Result<usize, FrameError> {
    let Header { version, len, .. } = Header::parse(h)?;
    let ours = Versions::OURS;
    if !ours.contains(version) {
        let found = version;
        return Err(FrameError::Version { found, ours });
    }
    Ok(len)
}

/// Encodes a whole frame of the oldest version, for callers that send it themselves.
///
/// # Errors
/// Returns [`FrameError::TooLong`] if the body is too long, and [`FrameError::Body`] if the message cannot be
/// serialized.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    encode_as(Versions::OURS.oldest, Versions::OURS, message)
}

fn encode_as<T: Serialize>(
    version: u16,
    ours: Versions,
    message: &T,
) -> Result<Vec<u8>, FrameError> {
    let body = serde_json::to_vec(message).map_err(FrameError::Body)?;
    let mut bytes = header(version, ours, body.len())?.to_vec();
    bytes.extend_from_slice(&body);
    Ok(bytes)
}

/// Sends one message of the oldest version and its descriptors.
///
/// # Errors
/// Returns the errors of [`encode`], and [`FrameError::Io`] if the socket fails. A part of the frame may then have been
/// sent, so the socket must not be used again.
pub fn send<T: Serialize>(
    socket: &UnixStream,
    message: &T,
    fds: &[BorrowedFd<'_>],
) -> Result<(), FrameError> {
    send_bytes(socket, &encode(message)?, fds)
}

/// Like [`send`], with a message of `version` from a program that supports `ours`.
///
/// # Errors
/// Returns the errors of [`send`].
pub fn send_as<T: Serialize>(
    socket: &UnixStream,
    (version, ours): (u16, Versions),
    message: &T,
    fds: &[BorrowedFd<'_>],
) -> Result<(), FrameError> {
    send_bytes(socket, &encode_as(version, ours, message)?, fds)
}

/// Replies to a frame of an unsupported version ([`FrameError::Version`]) with the supported versions.
///
/// # Errors
/// Returns the errors of [`send`].
pub fn refuse(socket: &UnixStream, ours: Versions) -> Result<(), FrameError> {
    send_as(socket, (REFUSAL, ours), &ours, &[])
}

fn send_bytes(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), FrameError> {
    let mut rest = bytes;
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

/// A received frame.
#[derive(Debug)]
pub struct Frame<T> {
    pub message: T,
    pub fds: Vec<OwnedFd>,
    /// The version of the message.
    pub version: u16,
    /// The newest version that the sender supports.
    pub newest: u16,
}

/// Receives one message and its descriptors. Blocks according to the socket's timeout.
///
/// # Errors
/// Returns [`FrameError::Closed`] if the peer closed the socket between frames, and the other variants for invalid
/// frames.
pub fn receive<T: DeserializeOwned>(socket: &UnixStream) -> Result<(T, Vec<OwnedFd>), FrameError> {
    let frame = receive_as(socket, Versions::OURS, None)?;
    Ok((frame.message, frame.fds))
}

/// Receives one message of a version in `ours`. `time` limits the whole message. `None`: the socket's own timeout
/// applies to each read.
///
/// # Errors
/// Returns the errors of [`receive`], and [`FrameError::Io`] if the message is not complete within `time`.
pub fn receive_as<T: DeserializeOwned>(
    socket: &UnixStream,
    ours: Versions,
    time: Option<Duration>,
) -> Result<Frame<T>, FrameError> {
    receive_by(socket, ours, time.map(|time| Instant::now() + time))
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
    ours: Versions,
    end: Option<Instant>,
) -> Result<Frame<T>, FrameError> {
    let mut h = [0; HEADER];
    wait_until(socket, end)?;
    let (mut got, fds) = receive_first(socket, &mut h)?;
    while got < HEADER {
        wait_until(socket, end)?;
        got += read_some(socket, &mut h[got..])?;
    }
    let Header {
        version,
        newest,
        len,
    } = Header::parse(&h)?;
    let mut body = vec![0; len];
    let mut at = 0;
    while at < body.len() {
        wait_until(socket, end)?;
        at += read_some(socket, &mut body[at..])?;
    }
    if version == REFUSAL {
        let peer = serde_json::from_slice(&body).map_err(FrameError::Body)?;
        return Err(FrameError::Refused { peer, ours });
    }
    if !ours.contains(version) {
        let found = version;
        return Err(FrameError::Version { found, ours });
    }
    let message = serde_json::from_slice(&body).map_err(FrameError::Body)?;
    Ok(Frame {
        message,
        fds,
        version,
        newest,
    })
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
        let got = receive_as::<String>(&a, Versions::OURS, Some(Duration::from_millis(200)));
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

    #[test]
    fn a_frame_of_another_version_is_refused_and_the_next_one_is_read() {
        let (a, b) = UnixStream::pair().unwrap();
        let newer = Versions {
            oldest: Versions::OURS.newest + 1,
            newest: Versions::OURS.newest + 2,
        };
        send_as(&a, (newer.oldest, newer), &"what a later release says", &[]).unwrap();
        send(&a, &"hello", &[]).unwrap();
        let refused = receive::<String>(&b).unwrap_err();
        let FrameError::Version { found, ours } = refused else {
            panic!("{refused:?}");
        };
        assert_eq!((found, ours), (newer.oldest, Versions::OURS));
        refuse(&b, ours).unwrap();
        assert_eq!(receive::<String>(&b).unwrap().0, "hello");
        let refused = receive_as::<String>(&a, newer, None).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "the VMM supports the versions 2 to 2 of the control protocol, this program 3 to 4"
        );
    }

    #[test]
    fn the_newest_common_version_is_chosen() {
        let versions = |oldest, newest| Versions { oldest, newest };
        assert_eq!(versions(2, 4).common(versions(3, 7)), Some(4));
        assert_eq!(versions(2, 4).common(versions(1, 3)), Some(3));
        assert_eq!(versions(2, 4).common(versions(5, 7)), None);
        assert_eq!(versions(5, 7).common(versions(2, 4)), None);
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
