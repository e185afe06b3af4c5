//! Connecting to a unix socket with a timeout.

use std::{
    io,
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::Path,
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr},
};

/// Connects to a listening unix socket. A stopped or compromised process does not accept connections. Once its backlog
/// is full, a plain `connect` blocks forever; this function waits for at most `timeout` (`None`: no limit).
///
/// # Errors
/// Returns the error of `connect(2)` if no process listens at `path`, an error if `path` is too long for a socket
/// address, [`io::ErrorKind::TimedOut`] after `timeout`, and [`io::ErrorKind::InvalidInput`] for a timeout of zero.
pub fn connect(path: &Path, timeout: Option<Duration>) -> io::Result<UnixStream> {
    let socket = socket::socket(
        AddressFamily::Unix,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    let stream = UnixStream::from(socket);
    // SO_SNDTIMEO also limits connect(2) (unix(7), socket(7)).
    stream.set_write_timeout(timeout)?;
    let address = UnixAddr::new(path)?;
    loop {
        match socket::connect(stream.as_raw_fd(), &address) {
            Ok(()) => break,
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => {
                let why = "the process does not accept connections and its backlog is full";
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            Err(error) => return Err(error.into()),
        }
    }
    stream.set_write_timeout(None)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, sync::mpsc::channel, thread};

    use nix::sys::socket::Backlog;

    use crate::ControlClient;

    use super::*;

    #[test]
    fn connecting_to_a_full_backlog_times_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let listener = UnixListener::bind(&path).unwrap();
        socket::listen(&listener, Backlog::new(1).unwrap()).unwrap();
        let (sender, receiver) = channel();
        thread::spawn(move || {
            let patience = Some(Duration::from_millis(20));
            let mut queued = Vec::new();
            let refused = loop {
                match ControlClient::connect(&path, patience) {
                    Ok(client) => queued.push(client),
                    Err(error) => break error,
                }
            };
            sender.send((queued.len(), refused)).unwrap();
        });
        let answer = receiver.recv_timeout(Duration::from_secs(30));
        let (queued, refused) = answer.expect("connect ends after its timeout");
        assert_eq!((queued, refused.kind()), (2, io::ErrorKind::TimedOut));
        drop(listener);
    }

    #[test]
    fn a_missing_listener_and_an_accepting_one_give_different_results() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let patience = Some(Duration::from_secs(30));
        let kind = || connect(&path, patience).map_err(|e| e.kind()).map(drop);
        assert_eq!(kind(), Err(io::ErrorKind::NotFound));
        let listener = UnixListener::bind(&path).unwrap();
        let stream = connect(&path, patience).unwrap();
        assert_eq!(stream.write_timeout().unwrap(), None);
        drop(listener);
        assert_eq!(kind(), Err(io::ErrorKind::ConnectionRefused));
        assert!(connect(&path, Some(Duration::ZERO)).is_err());
    }
}
