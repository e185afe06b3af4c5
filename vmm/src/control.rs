//! The server side of the control socket: one client at a time.
//!
//! On a connected socket, end-of-file ends the VM. On a listening one, the VM outlives its clients: they connect one
//! after another, and a client that disconnects cancels only its pending request. An answer must never reach the next
//! client.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    time::Duration,
};

use nix::sys::socket::{getsockopt, sockopt};
use vmm_control::{
    Call, Failure, Reply, Request,
    files::Files,
    frame::{self, FrameError},
};

use crate::watch::{Interest, Token, Watch};

/// Timeout of each read from and each write to a client of a listening socket. It does not limit the time for a whole
/// frame: a client that keeps sending single bytes stalls the VM for longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The control socket and its current client.
#[derive(Debug)]
pub struct Control {
    listener: Option<UnixListener>,
    client: Option<UnixStream>,
}

/// The result of reading from the client.
#[derive(Debug)]
pub(crate) enum Received {
    /// A request and the files that came with it.
    Request(Box<Request>, Files),
    /// There is no request: a listening socket's client disconnected, or was dropped for an invalid or late frame.
    /// Another client may follow.
    Left,
    /// The client of a connected socket has disconnected.
    End,
}

impl Control {
    /// Takes a connected or a listening socket.
    ///
    /// # Errors
    /// Returns an error if the descriptor is not a socket, or cannot be made non-blocking.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        let (listener, client) = if getsockopt(&socket, sockopt::AcceptConn)? {
            (Some(UnixListener::from(socket)), None)
        } else {
            (None, Some(UnixStream::from(socket)))
        };
        if let Some(listener) = &listener {
            listener.set_nonblocking(true)?;
        }
        Ok(Self { listener, client })
    }

    /// Uses standard input as the control socket.
    ///
    /// # Errors
    /// Returns an error if standard input cannot be duplicated, or for the reasons of [`Control::new`].
    pub fn of_stdin() -> io::Result<Self> {
        Self::new(io::stdin().as_fd().try_clone_to_owned()?)
    }

    /// Whether the VM outlives its clients.
    #[must_use]
    pub fn is_listening(&self) -> bool {
        self.listener.is_some()
    }

    /// Watches for clients and for their requests.
    ///
    /// # Errors
    /// Returns an error if a socket cannot be watched or configured.
    pub(crate) fn attach(&mut self, watch: &mut Watch) -> io::Result<()> {
        if let Some(listener) = &self.listener {
            watch.add(listener, Token::ControlListener, Interest::ReadEdge)?;
        }
        match &self.client {
            Some(client) => watch.add(client, Token::ControlClient, Interest::Read),
            None => self.accept(watch),
        }
    }

    /// Accepts the next client of a listening socket, unless there already is a client.
    ///
    /// # Errors
    /// Returns an error if the client cannot be configured or watched. Failures of `accept` itself are ignored.
    pub(crate) fn accept(&mut self, watch: &mut Watch) -> io::Result<()> {
        let Some(listener) = self.listener.as_ref().filter(|_| self.client.is_none()) else {
            return Ok(());
        };
        let Ok((client, _)) = listener.accept() else {
            return Ok(());
        };
        client.set_read_timeout(Some(PATIENCE))?;
        client.set_write_timeout(Some(PATIENCE))?;
        watch.add(&client, Token::ControlClient, Interest::Read)?;
        self.client = Some(client);
        Ok(())
    }

    /// Reads a request. A listening socket drops a client whose frame is invalid or late.
    ///
    /// # Errors
    /// Returns [`FrameError`] if a connected socket fails or receives an invalid frame, or if a listening socket's next
    /// client cannot be set up.
    pub(crate) fn receive(&mut self, watch: &mut Watch) -> Result<Received, FrameError> {
        let Some(client) = &self.client else {
            return Ok(Received::Left);
        };
        let call = frame::receive::<Call>(client)
            .and_then(|(call, fds)| Ok((call.request, Files::received(&call.files, fds)?)));
        match call {
            Ok((request, files)) => Ok(Received::Request(Box::new(request), files)),
            Err(_) if self.is_listening() => {
                self.client = None;
                self.accept(watch).map_err(FrameError::Io)?;
                Ok(Received::Left)
            }
            Err(FrameError::Closed) => Ok(Received::End),
            Err(e) => Err(e),
        }
    }

    /// Sends an answer to the client. I/O errors are ignored: if the client has disconnected, the next read reports it.
    ///
    /// # Errors
    /// Returns [`FrameError`] if the answer cannot be encoded or is too long for a frame.
    pub(crate) fn reply(&self, answer: &Result<Reply, Failure>) -> Result<(), FrameError> {
        let Some(client) = &self.client else {
            return Ok(());
        };
        match frame::send(client, answer, &[]) {
            Err(FrameError::Io(_)) | Ok(()) => Ok(()),
            Err(e) => Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::watch::{Events, tests::test_watch};

    #[test]
    fn a_listening_socket_serves_clients_one_after_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let mut watch = test_watch();
        let mut control = Control::new(UnixListener::bind(&path).unwrap().into()).unwrap();
        assert!(control.is_listening());
        control.attach(&mut watch).unwrap();
        let mut first = UnixStream::connect(&path).unwrap();
        let second = UnixStream::connect(&path).unwrap();
        let mut events = Events::default();
        watch.wait(&mut events, None).unwrap();
        assert_eq!(
            events.tokens().collect::<Vec<_>>(),
            [Token::ControlListener]
        );
        control.accept(&mut watch).unwrap();
        // The first client disconnects in the middle of a frame; the next one is served.
        first.write_all(b"CVMC\x01").unwrap();
        drop(first);
        let got = control.receive(&mut watch).unwrap();
        assert!(matches!(got, Received::Left), "{got:?}");
        frame::send(&second, &Call::from(Request::Stats), &[]).unwrap();
        let got = control.receive(&mut watch).unwrap();
        assert!(
            matches!(&got, Received::Request(request, _) if **request == Request::Stats),
            "{got:?}"
        );
        control.reply(&Ok(Reply::Done)).unwrap();
        let (answer, _) = frame::receive::<Result<Reply, Failure>>(&second).unwrap();
        assert_eq!(answer, Ok(Reply::Done));
    }

    #[test]
    fn end_of_file_on_a_connected_socket_ends_the_vm() {
        let mut watch = test_watch();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut control = Control::new(theirs.into()).unwrap();
        assert!(!control.is_listening());
        control.attach(&mut watch).unwrap();
        drop(ours);
        let got = control.receive(&mut watch).unwrap();
        assert!(matches!(got, Received::End), "{got:?}");
    }
}
