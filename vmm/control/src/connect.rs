//! Connecting to a process that may not accept.

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

/// Connects to a listening unix socket. A process that is stopped, or taken over, accepts nothing: once its queue of
/// connections is full a plain connect would wait for ever, and this one waits for `timeout` (`None`: for ever).
///
/// # Errors
/// Nobody listens there; [`io::ErrorKind::TimedOut`]; a timeout of zero.
pub fn connect(path: &Path, timeout: Option<Duration>) -> io::Result<UnixStream> {
    let socket = socket::socket(
        AddressFamily::Unix,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    let stream = UnixStream::from(socket);
    // SO_SNDTIMEO bounds connect as well (unix(7), socket(7)).
    stream.set_write_timeout(timeout)?;
    let address = UnixAddr::new(path)?;
    loop {
        match socket::connect(stream.as_raw_fd(), &address) {
            Ok(()) => break,
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => {
                let why = "it accepts no connection, and its queue of them is full";
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
    fn a_full_queue_is_not_waited_for_longer_than_asked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let listener = UnixListener::bind(&path).unwrap();
        socket::listen(&listener, Backlog::new(1).unwrap()).unwrap();
        let (tell, hear) = channel();
        thread::spawn(move || {
            let patience = Some(Duration::from_millis(20));
            let mut queued = Vec::new();
            let refused = loop {
                match ControlClient::connect(&path, patience) {
                    Ok(client) => queued.push(client),
                    Err(error) => break error,
                }
            };
            tell.send((queued.len(), refused)).unwrap();
        });
        let answer = hear.recv_timeout(Duration::from_secs(30));
        let (queued, refused) = answer.expect("connect waits");
        assert_eq!((queued, refused.kind()), (2, io::ErrorKind::TimedOut));
        drop(listener);
    }

    #[test]
    fn nobody_is_told_from_a_process_that_accepts() {
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
