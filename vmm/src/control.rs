//! The control socket: one client at a time.
//!
//! A connected socket is somebody's who wants the VM to end with him. A listening one is somebody's who wants
//! it to outlive him: clients come and go, one after another, and one that leaves takes with him only the
//! request that he was waiting for. What must never happen: that an answer reaches the next client.

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

/// A client of a listener that stops in the middle of a frame holds the VM up for this long at most.
const PATIENCE: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Debug)]
pub struct Control {
    listener: Option<UnixListener>,
    client: Option<UnixStream>,
}

/// What came from a client.
#[derive(Debug)]
pub(crate) enum Received {
    /// Something to do, and the files that came with it.
    Request(Box<Request>, Files),
    /// The client left; there may be another.
    Left,
    /// The only client that can be left.
    End,
}

impl Control {
    /// Takes a socket that is connected or listening.
    ///
    /// # Errors
    /// It is no socket.
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

    /// The control socket that is this process's standard input.
    ///
    /// # Errors
    /// It is no socket.
    pub fn of_stdin() -> io::Result<Self> {
        Self::new(io::stdin().as_fd().try_clone_to_owned()?)
    }

    /// Whether the VM is to outlive its clients.
    #[must_use]
    pub fn is_listening(&self) -> bool {
        self.listener.is_some()
    }

    /// Has the watch tell of clients and of their requests.
    ///
    /// # Errors
    /// The watch's.
    pub(crate) fn attach(&mut self, watch: &mut Watch) -> io::Result<()> {
        if let Some(listener) = &self.listener {
            watch.add(listener, Token::ControlListener, Interest::ReadEdge)?;
        }
        match &self.client {
            Some(client) => watch.add(client, Token::ControlClient, Interest::Read),
            None => self.accept(watch),
        }
    }

    /// Takes the next client if there is none now.
    ///
    /// # Errors
    /// The watch's. A client that is gone already is none.
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

    /// Reads the request that the watch told of.
    ///
    /// # Errors
    /// What a lone client sends cannot be read.
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

    /// Answers the client; one that is gone says so at the next read.
    ///
    /// # Errors
    /// The answer cannot be put into a frame.
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
    fn clients_of_a_listener_come_one_after_another() {
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
        // Half a frame, and then nothing more: the client is dropped, and the next one is heard.
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
    fn a_lone_client_ends_it() {
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
