//! The zygote: a Python process in which all modules are loaded and no cell ever runs. Python's hosts are forks of
//! it. A fork takes milliseconds, while loading takes a second, and pages that a host does not write stay shared.
//!
//! ```text
//! server ── orders, one per packet; `fork` has three descriptors ─► zygote ─┬─ fork ─► host of a context
//!    ▲                                                                     └─ fork ─► …
//!    └── control socket, stdout, stderr, as for any host ───────────────────────────────┘
//! ```
//! Hosts are children of the zygote, which signals and reaps them by PID. The server refers to them by numbers that
//! it assigns, so a signal cannot reach a process that has reused a PID. Orders are carried out in order and have
//! no responses: a host itself reports that it is ready, and if the zygote ends, its hosts end with it and their
//! sockets close.

use std::{
    io::{self, IoSlice},
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::process::CommandExt,
    },
    process::{Child, Command, Stdio},
    rc::Rc,
};

use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair,
};
use serde::Serialize;

use crate::{
    language::{Language, Start},
    setup::Setup,
    sys,
};

/// An order. Numbers of hosts are never reused.
#[derive(Debug, Serialize)]
#[serde(tag = "order", rename_all = "lowercase")]
enum Order<'a> {
    /// Fork a host. Its control socket, standard output and error are attached.
    Fork {
        host: u64,
        cwd: &'a str,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        warm: bool,
    },
    /// Interrupt the host's process group.
    Interrupt { host: u64 },
    /// Kill the host's process group.
    End { host: u64 },
}

/// The socket to a zygote. The zygote ends when the last owner of the socket drops it.
#[derive(Debug)]
struct Link(OwnedFd);

impl Link {
    /// Sends an order without blocking. Fails if the zygote does not read its orders, or if it has ended, and its hosts
    /// with it.
    fn tell(&self, order: &Order<'_>, ends: &[RawFd]) -> nix::Result<()> {
        // Serializing numbers and strings cannot fail.
        let packet = serde_json::to_vec(order).unwrap_or_default();
        let rights = [ControlMessage::ScmRights(ends)];
        let rights = rights
            .get(..usize::from(!ends.is_empty()))
            .unwrap_or_default();
        // A zygote that leaves the socket's buffer full counts as dead.
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        sendmsg::<()>(
            self.0.as_raw_fd(),
            &[IoSlice::new(&packet)],
            rights,
            flags,
            None,
        )?;
        Ok(())
    }
}

/// Descriptors that a host gets; the server has the other ends.
pub(crate) struct Ends<'a> {
    pub(crate) control: BorrowedFd<'a>,
    pub(crate) stdout: BorrowedFd<'a>,
    pub(crate) stderr: BorrowedFd<'a>,
}

/// A host that is a child of the zygote.
#[derive(Debug)]
pub(crate) struct Fork {
    host: u64,
    link: Rc<Link>,
}

impl Fork {
    pub(crate) fn interrupt(&self) {
        let _ = self.link.tell(&Order::Interrupt { host: self.host }, &[]);
    }

    pub(crate) fn end(self) {
        let _ = self.link.tell(&Order::End { host: self.host }, &[]);
    }
}

/// The zygote, started on first use and again after it has ended.
#[derive(Debug, Default)]
pub(crate) struct Zygote {
    live: Option<(Child, Rc<Link>)>,
    /// Ended processes that are not yet reaped.
    dead: Vec<Child>,
    last_host: u64,
}

impl Zygote {
    /// Orders a fork. A zygote that is still loading carries it out once it is ready.
    ///
    /// # Errors
    /// Returns an error if no zygote can be started, or a new one does not accept the order.
    pub(crate) fn fork(&mut self, setup: &Setup<'_>, ends: &Ends<'_>) -> io::Result<Fork> {
        self.dead
            .retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        self.last_host += 1;
        let order = Order::Fork {
            host: self.last_host,
            cwd: setup.cwd,
            warm: setup.how == Start::Warm,
        };
        let ends = [ends.control, ends.stdout, ends.stderr].map(|end| end.as_raw_fd());
        if let Some((_, link)) = &self.live
            && link.tell(&order, &ends).is_ok()
        {
            let link = Rc::clone(link);
            let host = self.last_host;
            return Ok(Fork { host, link });
        }
        if let Some((mut child, _)) = self.live.take() {
            // Sending fails only if the zygote has ended or does not read any more.
            let _ = child.kill();
            self.dead.push(child);
        }
        let (child, link) = start(setup)?;
        link.tell(&order, &ends)?;
        self.live = Some((child, Rc::clone(&link)));
        let host = self.last_host;
        Ok(Fork { host, link })
    }
}

fn start(setup: &Setup<'_>) -> io::Result<(Child, Rc<Link>)> {
    let kind = SockType::SeqPacket;
    let (ours, theirs) = socketpair(AddressFamily::Unix, kind, None, SockFlag::SOCK_CLOEXEC)?;
    let words = Language::Python.command(setup.hosts, setup.how);
    let (program, arguments) = words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .current_dir("/")
        .stdin(theirs)
        .stdout(Stdio::null())
        .process_group(0);
    sys::end_with_parent(&mut command);
    Ok((command.spawn()?, Rc::new(Link(ours))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clone_state::Variables;
    use nix::{
        cmsg_space,
        sys::socket::{ControlMessageOwned, recvmsg},
    };
    use std::{io::IoSliceMut, os::fd::AsFd};

    #[test]
    fn an_order_is_one_packet_with_the_descriptors_of_a_host() {
        let kind = SockType::SeqPacket;
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, kind, None, SockFlag::SOCK_CLOEXEC).unwrap();
        let link = Rc::new(Link(ours));
        let fork = Fork {
            host: 7,
            link: Rc::clone(&link),
        };
        let order = Order::Fork {
            host: 7,
            cwd: "/ä",
            warm: false,
        };
        let ends = [0, 1, 2];
        link.tell(&order, &ends).unwrap();
        fork.interrupt();
        fork.end();
        let receive = || {
            let mut bytes = [0; 256];
            let mut space = cmsg_space!([RawFd; 3]);
            let mut slices = [IoSliceMut::new(&mut bytes)];
            let flags = MsgFlags::empty();
            let message =
                recvmsg::<()>(theirs.as_raw_fd(), &mut slices, Some(&mut space), flags).unwrap();
            let rights: usize = message
                .cmsgs()
                .unwrap()
                .map(|message| match message {
                    ControlMessageOwned::ScmRights(fds) => fds.len(),
                    _ => 0,
                })
                .sum();
            let len = message.bytes;
            (String::from_utf8(bytes[..len].to_vec()).unwrap(), rights)
        };
        assert_eq!(
            receive(),
            (r#"{"order":"fork","host":7,"cwd":"/ä"}"#.to_owned(), 3)
        );
        assert_eq!(
            receive(),
            (r#"{"order":"interrupt","host":7}"#.to_owned(), 0)
        );
        assert_eq!(receive(), (r#"{"order":"end","host":7}"#.to_owned(), 0));
    }

    #[test]
    fn a_dead_zygote_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let setup = Setup {
            hosts: dir.path(),
            cwd: "/",
            how: Start::Plain,
            env: &Variables::new(),
        };
        let (reader, writer) = io::pipe().unwrap();
        let ends = Ends {
            control: writer.as_fd(),
            stdout: writer.as_fd(),
            stderr: writer.as_fd(),
        };
        let mut zygote = Zygote::default();
        // The directory contains no program, so Python ends at once, and the descriptors sent to it are closed.
        zygote.fork(&setup, &ends).unwrap();
        let first = zygote
            .live
            .as_mut()
            .map(|(child, _)| (child.id(), child.wait().unwrap()));
        zygote.fork(&setup, &ends).unwrap();
        let second = zygote
            .live
            .as_mut()
            .map(|(child, _)| (child.id(), child.wait().unwrap()));
        assert_ne!(first.unwrap().0, second.unwrap().0);
        drop((zygote, writer));
        assert_eq!(io::read_to_string(reader).unwrap(), "");
    }
}
