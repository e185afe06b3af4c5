//! The zygote: a process of Python in which everything is loaded and no cell ever runs. Python's hosts are forks of
//! it, which takes milliseconds where loading takes a second, and what they do not write they share.
//!
//! ```text
//! server ── orders, one a packet; with `fork` three descriptors ──► zygote ─┬─ fork ─► host of a context
//!    ▲                                                                     └─ fork ─► …
//!    └── control socket, stdout, stderr, as those of any host ──────────────────────────┘
//! ```
//! Hosts are the zygote's children: it knows their process ids, ends them and takes them out of the process table.
//! The server knows them by numbers of its own, so that no signal ever reaches a process that has another's id.
//! Orders are kept in order and nothing is answered: a host says by itself that it is ready, and a zygote that dies
//! takes its hosts along, whose sockets then close.

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
    host::Setup,
    language::{Language, Start},
    sys,
};

/// An order. The number of a host is never used again.
#[derive(Debug, Serialize)]
#[serde(tag = "order", rename_all = "lowercase")]
enum Order<'a> {
    /// Make a host; its control socket, standard output and error come along.
    Fork {
        host: u64,
        cwd: &'a str,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        warm: bool,
    },
    /// Stop what runs, with all that it started.
    Interrupt { host: u64 },
    /// End it with all that it started.
    End { host: u64 },
}

/// The way to a zygote; it ends with the last one who holds this.
#[derive(Debug)]
struct Link(OwnedFd);

impl Link {
    /// An order that finds no zygote is lost, as its hosts are.
    fn tell(&self, order: &Order<'_>, ends: &[RawFd]) -> nix::Result<()> {
        // Numbers and strings always become JSON.
        let packet = serde_json::to_vec(order).unwrap_or_default();
        let rights = [ControlMessage::ScmRights(ends)];
        let rights = rights
            .get(..usize::from(!ends.is_empty()))
            .unwrap_or_default();
        // A zygote that does not read while a socket's buffer fills counts as dead.
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

/// What a host gets; the server has the other ends.
pub(crate) struct Ends<'a> {
    pub(crate) control: BorrowedFd<'a>,
    pub(crate) stdout: BorrowedFd<'a>,
    pub(crate) stderr: BorrowedFd<'a>,
}

/// A host that is the zygote's child.
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

/// The zygote: started when it is first needed, and again when it has died.
#[derive(Debug, Default)]
pub(crate) struct Zygote {
    live: Option<(Child, Rc<Link>)>,
    /// Not yet out of the process table.
    dead: Vec<Child>,
    last_host: u64,
}

impl Zygote {
    /// Has it make a host. One that is still loading does so when it is ready.
    ///
    /// # Errors
    /// No zygote can be started.
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
            // Only what has ended does not hear, or what does not listen any more.
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
    fn orders_are_packets_and_carry_the_ends_of_a_host() {
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
    fn a_zygote_that_has_died_is_followed_by_another() {
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
        // There is no program in that directory: Python ends at once, and what it was sent is closed.
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
