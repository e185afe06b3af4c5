//! The server side of the control socket: one client at a time.
//!
//! On a connected socket, end-of-file ends the VM. On a listening one, the VM outlives its clients: they connect one
//! after another, and a client that disconnects cancels only its pending request. A response must never reach the next
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
    Call, Failure, FailureKind, Reply, Request,
    files::Files,
    frame::{self, Frame, FrameError, Versions},
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
    versions: Versions,
    /// The version of the last request, which the response also uses.
    version: u16,
    /// A descriptor that is given up to accept a client when no other one is free: a guest's connections can use up all
    /// descriptors.
    spare: Option<OwnedFd>,
}

/// The result of reading from the client.
#[derive(Debug)]
pub(crate) enum Received {
    /// A request and the files that came with it.
    Request(Box<Request>, Files),
    /// The request is invalid. The reply must be this failure.
    Invalid(Failure),
    /// The request had a version that this program does not support. A reply was sent.
    Refused,
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
        let mut this = Self {
            listener,
            client,
            versions: Versions::OURS,
            version: Versions::OURS.oldest,
            spare: None,
        };
        this.keep_spare();
        Ok(this)
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
    /// Returns an error if the client cannot be configured or watched. If `accept` fails because the host or this process
    /// lacks a resource, the next wait tries again.
    pub(crate) fn accept(&mut self, watch: &mut Watch) -> io::Result<()> {
        while self.client.is_none()
            && let Some(listener) = &self.listener
        {
            match listener.accept() {
                Ok((client, _)) => {
                    client.set_read_timeout(Some(PATIENCE))?;
                    client.set_write_timeout(Some(PATIENCE))?;
                    watch.add(&client, Token::ControlClient, Interest::Read)?;
                    self.client = Some(client);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // The client has disconnected already, or a signal arrived.
                Err(e) if is_passing(&e) => {}
                Err(e) if is_full_table(&e) && self.spare.take().is_some() => {}
                // The listener is watched for changes. Without this, the waiting client would not be reported again.
                Err(_) => {
                    return watch.modify(listener, Token::ControlListener, Interest::ReadEdge);
                }
            }
        }
        Ok(())
    }

    /// Drops the client of a listening socket, and accepts the next one.
    fn drop_client(&mut self, watch: &mut Watch) -> io::Result<()> {
        self.client = None;
        self.keep_spare();
        self.accept(watch)
    }

    /// Reserves a descriptor for the next client. This can fail only while no descriptor is free.
    fn keep_spare(&mut self) {
        if self.spare.is_none() {
            let listener = self.listener.as_ref();
            self.spare = listener.and_then(|l| l.as_fd().try_clone_to_owned().ok());
        }
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
        let call = frame::receive_as::<Call>(client, self.versions, None).and_then(|frame| {
            let Frame {
                message: Call { request, files },
                fds,
                version,
                ..
            } = frame;
            Ok((version, request, Files::received(&files, fds)?))
        });
        match call {
            Ok((version, request, files)) => {
                self.version = version;
                Ok(Received::Request(Box::new(request), files))
            }
            // The whole frame was read, so a reply to the client is possible.
            Err(e @ (FrameError::Body(_) | FrameError::Files { .. })) => {
                Ok(Received::Invalid(Failure {
                    kind: FailureKind::BadSpec,
                    message: model::chain(&e),
                }))
            }
            Err(FrameError::Version { ours, .. }) => {
                let sent = frame::refuse(client, ours);
                self.sent(sent, watch)?;
                Ok(Received::Refused)
            }
            Err(_) if self.is_listening() => {
                self.drop_client(watch).map_err(FrameError::Io)?;
                Ok(Received::Left)
            }
            Err(FrameError::Closed) => Ok(Received::End),
            Err(e) => Err(e),
        }
    }

    /// Sends a reply to the client. If this fails, the client is dropped: it may have received a part of the reply, so
    /// it could not find the beginning of the next one.
    ///
    /// # Errors
    /// Returns [`FrameError`] if the reply cannot be encoded or is too long for a frame, or if a listening socket's
    /// next client cannot be set up.
    pub(crate) fn reply(
        &mut self,
        answer: &Result<Reply, Failure>,
        watch: &mut Watch,
    ) -> Result<(), FrameError> {
        let Some(client) = &self.client else {
            return Ok(());
        };
        let speaks = (self.version, self.versions);
        let sent = frame::send_as(client, speaks, answer, &[]);
        self.sent(sent, watch)
    }

    fn sent(&mut self, sent: Result<(), FrameError>, watch: &mut Watch) -> Result<(), FrameError> {
        match sent {
            Err(FrameError::Io(_)) if self.is_listening() => {
                self.drop_client(watch).map_err(FrameError::Io)
            }
            // The next read reports that the client of a connected socket has disconnected.
            Err(FrameError::Io(_)) | Ok(()) => Ok(()),
            Err(e) => Err(e),
        }
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
    )
}

/// Whether this process has no free descriptor.
fn is_full_table(error: &io::Error) -> bool {
    error.raw_os_error() == Some(nix::libc::EMFILE)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use nix::sys::resource::{Resource, getrlimit, setrlimit};

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
        control.reply(&Ok(Reply::Done), &mut watch).unwrap();
        let (answer, _) = frame::receive::<Result<Reply, Failure>>(&second).unwrap();
        assert_eq!(answer, Ok(Reply::Done));
    }

    /// A listening control socket and its first client.
    fn served(dir: &tempfile::TempDir, watch: &mut Watch) -> (Control, UnixStream) {
        let path = dir.path().join("control");
        let mut control = Control::new(UnixListener::bind(&path).unwrap().into()).unwrap();
        control.attach(watch).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        control.accept(watch).unwrap();
        (control, client)
    }

    #[test]
    fn a_request_of_an_unknown_version_or_field_is_answered_and_the_next_one_is_served() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = test_watch();
        let (mut control, client) = served(&dir, &mut watch);
        let later = Versions {
            oldest: Versions::OURS.newest + 1,
            newest: Versions::OURS.newest + 1,
        };
        frame::send_as(&client, (later.oldest, later), &"a request", &[]).unwrap();
        let got = control.receive(&mut watch).unwrap();
        assert!(matches!(got, Received::Refused), "{got:?}");
        let refused = frame::receive_as::<Result<Reply, Failure>>(&client, later, None);
        let Err(FrameError::Refused { peer, .. }) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!(peer, Versions::OURS);

        let unknown = serde_json::json!({"request": {"snapshot": {"compressed": true}}});
        frame::send(&client, &unknown, &[]).unwrap();
        let got = control.receive(&mut watch).unwrap();
        let Received::Invalid(failure) = got else {
            panic!("{got:?}");
        };
        assert_eq!(failure.kind, FailureKind::BadSpec);
        assert!(failure.message.contains("`compressed`"), "{failure}");

        frame::send(&client, &Call::from(Request::Stats), &[]).unwrap();
        let got = control.receive(&mut watch).unwrap();
        assert!(matches!(got, Received::Request(..)), "{got:?}");
    }

    #[test]
    fn a_client_that_received_a_part_of_an_answer_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = test_watch();
        let (mut control, client) = served(&dir, &mut watch);
        let next = UnixStream::connect(dir.path().join("control")).unwrap();
        let soon = Some(Duration::from_millis(10));
        control
            .client
            .as_ref()
            .unwrap()
            .set_write_timeout(soon)
            .unwrap();
        let long = Failure {
            kind: FailureKind::Io,
            message: "x".repeat(frame::MAX_BODY / 2),
        };
        // The client does not read, so its socket buffer takes only a part.
        control.reply(&Err(long), &mut watch).unwrap();
        drop(client);
        frame::send(&next, &Call::from(Request::Stats), &[]).unwrap();
        let got = control.receive(&mut watch).unwrap();
        assert!(matches!(got, Received::Request(..)), "{got:?}");
        control.reply(&Ok(Reply::Done), &mut watch).unwrap();
        let (answer, _) = frame::receive::<Result<Reply, Failure>>(&next).unwrap();
        assert_eq!(answer, Ok(Reply::Done));
    }

    #[test]
    fn a_client_is_accepted_when_no_descriptor_is_free() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = test_watch();
        let (mut control, first) = served(&dir, &mut watch);
        drop(first);
        let client = UnixStream::connect(dir.path().join("control")).unwrap();
        let second = UnixStream::connect(dir.path().join("control")).unwrap();
        control.client = None;
        control.keep_spare();
        let mut taken = Vec::new();
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        // All descriptor numbers in use here are below 4096.
        setrlimit(Resource::RLIMIT_NOFILE, soft.min(4096), hard).unwrap();
        while let Ok(fd) = client.try_clone() {
            taken.push(fd);
        }
        control.accept(&mut watch).unwrap();
        assert!(control.client.is_some() && control.spare.is_none());
        // Without a spare descriptor, the waiting client is reported until it can be accepted.
        control.client = None;
        let filler = client.try_clone().unwrap();
        control.accept(&mut watch).unwrap();
        assert!(control.client.is_none());
        drop((filler, taken));
        let mut events = Events::default();
        watch.wait(&mut events, None).unwrap();
        let tokens: Vec<_> = events.tokens().collect();
        assert!(tokens.contains(&Token::ControlListener), "{tokens:?}");
        control.accept(&mut watch).unwrap();
        assert!(control.client.is_some());
        drop(second);
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
