//! Messages between the two processes: one line of text in each datagram of a `SOCK_SEQPACKET` socket, with descriptors.
//!
//! ```text
//! cube-handover 1 prepared
//! cube-handover 1 given listen internal dns-udp dns-tcp egress lock     with as many descriptors, in this order
//! cube-handover 1 serving
//! cube-handover 1 failed WHY
//! ```

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use netisolation::ResolverSockets;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair,
};
use tokio::io::Interest;
use tokio::net::UnixDatagram;

use super::{HandoverError, VERSION};

const NAME: &str = "cube-handover";
/// Maximum message length in bytes.
const MAX_MESSAGE: usize = 8192;
/// Maximum number of descriptors per message.
const MAX_FILES: usize = 64;

/// The purpose of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A listening socket of the server's addresses.
    Listen,
    /// The internal socket.
    Internal,
    /// The cluster listener.
    Cluster,
    /// The sockets of the sandboxes' DNS resolver. A build may omit or ignore them. DNS queries that arrive during the
    /// handover are then lost.
    DnsUdp,
    DnsTcp,
    /// The listener of the egress proxy. A build may also omit or ignore it.
    Egress,
    /// The lock of the state directory.
    Lock,
}

const ROLES: [(Role, &str); 7] = [
    (Role::Listen, "listen"),
    (Role::Internal, "internal"),
    (Role::Cluster, "cluster"),
    (Role::DnsUdp, "dns-udp"),
    (Role::DnsTcp, "dns-tcp"),
    (Role::Egress, "egress"),
    (Role::Lock, "lock"),
];

/// Descriptors with their roles.
#[derive(Debug, Default)]
pub struct Given(Vec<(Role, OwnedFd)>);

impl Given {
    pub fn add(&mut self, role: Role, fd: OwnedFd) {
        self.0.push((role, fd));
    }

    /// Takes all descriptors with a role, in order.
    pub fn take_all(&mut self, role: Role) -> Vec<OwnedFd> {
        let taken = self.0.extract_if(.., |(other, _)| *other == role);
        taken.map(|(_, fd)| fd).collect()
    }

    /// Takes the first descriptor with a role.
    pub fn take(&mut self, role: Role) -> Option<OwnedFd> {
        let at = self.0.iter().position(|(other, _)| *other == role)?;
        Some(self.0.remove(at).1)
    }

    pub fn add_resolver(&mut self, sockets: ResolverSockets) {
        self.add(Role::DnsUdp, sockets.udp.into());
        self.add(Role::DnsTcp, sockets.tcp.into());
        if let Some(proxy) = sockets.proxy {
            self.add(Role::Egress, proxy.into());
        }
    }

    /// Takes the resolver's sockets, if both were given, and the proxy's listener.
    pub fn take_resolver(&mut self) -> Option<ResolverSockets> {
        let (udp, tcp) = (self.take(Role::DnsUdp), self.take(Role::DnsTcp));
        let proxy = self.take(Role::Egress).map(Into::into);
        Some(ResolverSockets {
            udp: udp?.into(),
            tcp: tcp?.into(),
            proxy,
        })
    }
}

#[derive(Debug)]
pub(super) enum Message {
    Prepared,
    Given(Given),
    Serving,
    Failed(String),
}

/// One end of the connection. The Rust type is a datagram socket's, which supports the same calls.
#[derive(Debug)]
pub(super) struct Channel(UnixDatagram);

impl Channel {
    /// A connected pair: this process's end, and the other's.
    pub(super) fn pair() -> io::Result<(Self, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (own, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Self::new(own)?, other))
    }

    /// `socket` must be non-blocking.
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        UnixDatagram::from_std(socket.into()).map(Self)
    }

    pub(super) async fn send(&self, message: Message) -> Result<(), HandoverError> {
        let (text, given) = encode(message);
        let fds: Vec<_> = given.0.iter().map(|(_, fd)| fd.as_fd()).collect();
        let sent = self
            .0
            .async_io(Interest::WRITABLE, || send(self.0.as_fd(), &text, &fds));
        sent.await.map_err(HandoverError::Channel)
    }

    /// The next message; `None` if the other process has closed its end.
    pub(super) async fn receive(&self) -> Result<Option<Message>, HandoverError> {
        let received = self
            .0
            .async_io(Interest::READABLE, || receive(self.0.as_fd()));
        let (text, fds) = received.await.map_err(HandoverError::Channel)?;
        if text.is_empty() {
            return Ok(None);
        }
        decode(&text, fds).map(Some)
    }
}

fn send(socket: BorrowedFd<'_>, text: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !rights.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors"));
    }
    let text = [IoSlice::new(text.as_bytes())];
    sendmsg(socket, &text, &mut rights, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn receive(socket: BorrowedFd<'_>) -> io::Result<(String, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let mut text = vec![0; MAX_MESSAGE];
    let mut into = [IoSliceMut::new(&mut text)];
    let received = recvmsg(socket, &mut into, &mut rights, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in rights.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    if received
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        return Err(io::Error::other("a message is too long"));
    }
    text.truncate(received.bytes);
    Ok((String::from_utf8_lossy(&text).into_owned(), fds))
}

fn encode(message: Message) -> (String, Given) {
    let mut given = Given::default();
    let body = match message {
        Message::Prepared => "prepared".to_owned(),
        Message::Serving => "serving".to_owned(),
        Message::Failed(why) => {
            let why: String = why.chars().take(MAX_MESSAGE / 8).collect();
            format!("failed {why}")
        }
        Message::Given(all) => {
            let name = |role| ROLES.iter().find(|(other, _)| *other == role);
            let names = all.0.iter().filter_map(|(role, _)| name(*role));
            let names: Vec<_> = names.map(|(_, name)| *name).collect();
            given = all;
            format!("given {}", names.join(" "))
        }
    };
    (format!("{NAME} {VERSION} {body}"), given)
}

/// Descriptors with an unknown role, which a later build may send, are closed.
fn decode(text: &str, fds: Vec<OwnedFd>) -> Result<Message, HandoverError> {
    let unexpected = || HandoverError::Protocol(text.chars().take(200).collect());
    let rest = text
        .strip_prefix(NAME)
        .and_then(|rest| rest.strip_prefix(' '));
    let (version, body) = rest
        .and_then(|rest| rest.split_once(' '))
        .ok_or_else(unexpected)?;
    if version.parse() != Ok(VERSION) {
        return Err(HandoverError::Version(version.to_owned()));
    }
    let (word, rest) = body.split_once(' ').unwrap_or((body, ""));
    match word {
        "prepared" => Ok(Message::Prepared),
        "serving" => Ok(Message::Serving),
        "failed" => Ok(Message::Failed(rest.to_owned())),
        "given" => {
            let names: Vec<_> = rest.split_whitespace().collect();
            if names.len() != fds.len() {
                return Err(unexpected());
            }
            let role = |name| ROLES.iter().find(|(_, other)| *other == name);
            let both = names.into_iter().zip(fds);
            let known = both.filter_map(|(name, fd)| Some((role(name)?.0, fd)));
            Ok(Message::Given(Given(known.collect())))
        }
        _ => Err(unexpected()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn inode(fd: OwnedFd) -> u64 {
        File::from(fd).metadata().unwrap().ino()
    }

    #[tokio::test]
    async fn descriptors_arrive_in_order_with_their_roles() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| OwnedFd::from(File::create(dir.path().join(name)).unwrap());
        let mut given = Given::default();
        let all = [Role::Listen, Role::Lock, Role::Listen];
        let mut sent = Vec::new();
        for (at, role) in all.into_iter().enumerate() {
            let fd = file(&at.to_string());
            sent.push(inode(fd.try_clone().unwrap()));
            given.add(role, fd);
        }
        let (one, other) = Channel::pair().unwrap();
        let other = Channel::new(other).unwrap();
        one.send(Message::Given(given)).await.unwrap();
        let Some(Message::Given(mut got)) = other.receive().await.unwrap() else {
            panic!("not given");
        };
        let listen = got.take_all(Role::Listen).into_iter().map(inode);
        assert_eq!(listen.collect::<Vec<_>>(), [sent[0], sent[2]]);
        assert_eq!(got.take(Role::Lock).map(inode), Some(sent[1]));
        assert!(got.take(Role::Internal).is_none());
        drop(one);
        assert!(other.receive().await.unwrap().is_none());
    }

    #[test]
    fn messages_of_other_versions_and_with_missing_descriptors_are_refused() {
        for (text, expected) in [
            ("cube-handover 2 prepared", "version 2"),
            ("cube-handover 1 given lock", "unexpected"),
            ("cube-handover 1 dance", "unexpected"),
            ("cube-handover", "unexpected"),
            ("HTTP/1.1 200 OK", "unexpected"),
        ] {
            let why = decode(text, Vec::new()).unwrap_err().to_string();
            assert!(why.contains(expected), "{text}: {why}");
        }
    }

    #[test]
    fn unknown_roles_are_ignored_and_reasons_are_kept() {
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let given = decode("cube-handover 1 given moon lock", vec![null(), null()]);
        let Ok(Message::Given(mut given)) = given else {
            panic!("{given:?}");
        };
        assert!(given.take(Role::Lock).is_some() && given.0.is_empty());
        let (text, _) = encode(Message::Failed("no key.pem here".into()));
        let failed = decode(&text, Vec::new());
        assert!(matches!(failed, Ok(Message::Failed(why)) if why == "no key.pem here"));
    }
}
