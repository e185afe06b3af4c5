//! The part of ZeroMQ's wire protocol that a client of a Jupyter kernel needs: ZMTP 3.0 (RFC 23/ZMTP) over TCP with the
//! mechanism NULL, as a DEALER or a SUB.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

/// Largest message in bytes.
const MAX_MESSAGE: usize = 64 << 20;
/// Largest number of parts of a message.
const MAX_PARTS: usize = 64;

/// Time limit of each read in a handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// The socket type of this end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Dealer,
    /// Subscribed to every topic.
    Sub,
}

/// A connection to a socket of a kernel.
#[derive(Debug)]
pub(crate) struct Socket {
    stream: TcpStream,
    /// Bytes of an incomplete frame.
    input: Vec<u8>,
    /// Parts of an incomplete message.
    parts: Vec<Vec<u8>>,
}

impl Socket {
    /// Connects and does the handshake. Blocks.
    pub(crate) fn connect(port: u16, role: Role) -> io::Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        // Without a listener, a connection to a local port may connect to itself (TCP simultaneous open).
        if stream.local_addr()? == stream.peer_addr()? {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(HANDSHAKE))?;
        let mut socket = Self {
            stream,
            input: Vec::new(),
            parts: Vec::new(),
        };
        socket.shake_hands(role)?;
        socket.stream.set_read_timeout(None)?;
        Ok(socket)
    }

    fn shake_hands(&mut self, role: Role) -> io::Result<()> {
        let mut greeting = [0_u8; 64];
        // Signature, version 3.0, mechanism; the other bytes are zero.
        greeting[0] = 0xff;
        greeting[9] = 0x7f;
        greeting[10] = 3;
        greeting[12..16].copy_from_slice(b"NULL");
        self.stream.write_all(&greeting)?;
        let mut theirs = [0_u8; 64];
        self.stream.read_exact(&mut theirs)?;
        if theirs[0] != 0xff || theirs[10] < 3 || &theirs[12..17] != b"NULL\0" {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let kind: &[u8] = match role {
            Role::Dealer => b"DEALER",
            Role::Sub => b"SUB",
        };
        let mut ready = b"\x05READY".to_vec();
        push_property(&mut ready, b"Socket-Type", kind);
        if role == Role::Dealer {
            push_property(&mut ready, b"Identity", b"");
        }
        self.write_frame(COMMAND, &ready)?;
        if role == Role::Sub {
            // Subscribe to every topic.
            self.write_frame(0, &[1])?;
        }
        Ok(())
    }

    /// Sends a message. Blocks while the kernel does not read.
    pub(crate) fn send(&mut self, parts: &[Vec<u8>]) -> io::Result<()> {
        let mut left = parts.len();
        for part in parts {
            left -= 1;
            self.write_frame(if left > 0 { MORE } else { 0 }, part)?;
        }
        Ok(())
    }

    fn write_frame(&mut self, flags: u8, body: &[u8]) -> io::Result<()> {
        let mut frame = Vec::with_capacity(body.len() + 9);
        match u8::try_from(body.len()) {
            Ok(len) => frame.extend_from_slice(&[flags, len]),
            Err(_) => {
                frame.push(flags | LONG);
                let len = u64::try_from(body.len()).unwrap_or(u64::MAX);
                frame.extend_from_slice(&len.to_be_bytes());
            }
        }
        frame.extend_from_slice(body);
        self.stream.write_all(&frame)
    }

    /// Reads once. Blocks unless the socket is readable. End-of-file is an error.
    pub(crate) fn receive(&mut self, scratch: &mut [u8]) -> io::Result<()> {
        match self.stream.read(scratch)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            n => {
                self.input
                    .extend_from_slice(scratch.get(..n).unwrap_or_default());
                Ok(())
            }
        }
    }

    /// The next complete message. Commands are skipped.
    pub(crate) fn next_message(&mut self) -> io::Result<Option<Vec<Vec<u8>>>> {
        while let Some((flags, body, used)) = frame(&self.input)? {
            let body = body.to_vec();
            self.input.drain(..used);
            if flags & COMMAND != 0 {
                continue;
            }
            let held: usize = self.parts.iter().map(Vec::len).sum();
            if self.parts.len() >= MAX_PARTS || held + body.len() > MAX_MESSAGE {
                return Err(io::ErrorKind::InvalidData.into());
            }
            self.parts.push(body);
            if flags & MORE == 0 {
                return Ok(Some(std::mem::take(&mut self.parts)));
            }
        }
        Ok(None)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn push_property(to: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    // Names and values are short constants, so the conversions cannot fail.
    to.push(u8::try_from(name.len()).unwrap_or(0));
    to.extend_from_slice(name);
    let len = u32::try_from(value.len()).unwrap_or(0);
    to.extend_from_slice(&len.to_be_bytes());
    to.extend_from_slice(value);
}

/// The frame at the front: its flags, its body, and the length of the whole frame in bytes; `None` if it is incomplete.
/// Fails if the body is longer than [`MAX_MESSAGE`].
pub(crate) fn frame(bytes: &[u8]) -> io::Result<Option<(u8, &[u8], usize)>> {
    let Some((&flags, rest)) = bytes.split_first() else {
        return Ok(None);
    };
    let (len, head) = if flags & LONG == 0 {
        match rest.first() {
            Some(len) => (usize::from(*len), 2),
            None => return Ok(None),
        }
    } else {
        match rest.first_chunk::<8>() {
            Some(len) => (
                usize::try_from(u64::from_be_bytes(*len)).unwrap_or(usize::MAX),
                9,
            ),
            None => return Ok(None),
        }
    };
    if len > MAX_MESSAGE {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let body = bytes.get(head..head + len);
    Ok(body.map(|body| (flags, body, head + len)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::TcpListener;

    /// Both ends of a connection after the handshake: a socket, and the kernel's stream.
    fn pair(role: Role) -> (Socket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let kernel = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut greeting = [0; 64];
            stream.read_exact(&mut greeting).unwrap();
            stream.write_all(&greeting).unwrap();
            stream.write_all(b"\x04\x06\x05READY").unwrap();
            stream
        });
        let socket = Socket::connect(port, role).unwrap();
        (socket, kernel.join().unwrap())
    }

    #[test]
    fn the_handshake_follows_the_specification() {
        let (_socket, mut kernel) = pair(Role::Sub);
        let wanted = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB\x00\x01\x01";
        let mut said = vec![0; wanted.len()];
        kernel.read_exact(&mut said).unwrap();
        assert_eq!(said, wanted);
    }

    #[test]
    fn messages_of_any_size_are_received_whole() {
        let (mut socket, mut kernel) = pair(Role::Dealer);
        let parts = vec![vec![], vec![7; 255], vec![8; 256], vec![9; 70_000]];
        let mut wire = vec![MORE, 0, MORE, 255];
        wire.extend_from_slice(&parts[1]);
        for (flags, part) in [(MORE | LONG, &parts[2]), (LONG, &parts[3])] {
            wire.push(flags);
            wire.extend_from_slice(&u64::try_from(part.len()).unwrap().to_be_bytes());
            wire.extend_from_slice(part);
        }
        let writer = std::thread::spawn(move || kernel.write_all(&wire).map(|()| kernel));
        let mut scratch = [0; 999];
        let message = loop {
            if let Some(message) = socket.next_message().unwrap() {
                break message;
            }
            socket.receive(&mut scratch).unwrap();
        };
        assert_eq!(message, parts);
        drop(writer.join().unwrap());
        assert!(socket.receive(&mut scratch).is_err());
    }

    proptest! {
        #[test]
        fn hostile_frames_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Ok(Some((_, body, used))) = frame(&bytes) {
                prop_assert!(body.len() < used && used <= bytes.len());
            }
        }
    }
}
