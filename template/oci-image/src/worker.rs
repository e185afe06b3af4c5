//! The process that parses an image. Layers are untrusted: a bug in a parser must not affect the server.
//!
//! ```text
//! Converter ── Order: image, bash, busybox ─► worker   then the worker confines itself
//!           ── Part: layer, draft ──────────►          once for each layer
//!           ◄──────────────────────── Reply ──
//! Program   ── Order: blob ─────────────────► worker   then the worker confines itself, and reads the blob
//!           ◄──────────────────────── Reply ──
//! ```
//! The worker gets descriptors and opens nothing. Each message is one packet of JSON with its descriptors.

pub(crate) mod confine;

use std::{
    fs::File,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process::ExitCode,
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    assemble::{Layer, assemble},
    digest::Digest,
    limits::Limits,
    manifest::Compression,
    provision::Userland,
};
use confine::Resources;

/// Limit for the size of a message, in bytes.
const MAX_MESSAGE: usize = 16 << 10;
/// Limit for the length of an error in a reply, in characters.
const MAX_ERROR: usize = 2000;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) resources: Resources,
    pub(crate) task: Task,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Task {
    /// Make an image. With the descriptors of the image to write and, if `completes`, of bash and busybox.
    Convert {
        limits: Limits,
        layers: usize,
        completes: bool,
    },
    /// Compute the SHA-256 of the file whose descriptor follows.
    Sum,
}

/// One layer, with the descriptors of its blob and of the empty file for the unpacked layer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Part {
    pub(crate) compression: Compression,
    pub(crate) diff_id: Digest,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The image has been written.
    Done,
    Sum(Digest),
    /// The reason, for users.
    Refused(String),
}

/// Converts the image that the client sends on standard input.
#[must_use]
pub fn main() -> ExitCode {
    // Reports a panic as a refusal, wherever it happens. With `panic = "abort"` there is no other way to report it.
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string);
        let text = format!("converter panicked at {}", place.unwrap_or_default());
        // The client also sees that the process has ended.
        let _ = send(io::stdin().as_fd(), &Reply::Refused(text), &[]);
    }));
    let reply = match run(io::stdin().as_fd()) {
        Ok(reply) => reply,
        Err(error) => Reply::Refused(error.chars().take(MAX_ERROR).collect()),
    };
    match send(io::stdin().as_fd(), &reply, &[]) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn run(socket: BorrowedFd<'_>) -> Result<Reply, String> {
    let (order, mut files): (Order, _) = receive(socket).map_err(text)?;
    let mut next = || files.pop_front().ok_or("a descriptor is missing");
    let file = next()?;
    let Task::Convert {
        limits,
        layers,
        completes,
    } = order.task
    else {
        confine::confine(&order.resources).map_err(|error| chain(&error))?;
        let sum = Digest::of_file(&file);
        return sum
            .map(Reply::Sum)
            .map_err(|error| format!("cannot read the file: {error}"));
    };
    let userland = if completes {
        Some(Userland::of_files(&next()?, &next()?).map_err(text)?)
    } else {
        None
    };
    confine::confine(&order.resources).map_err(|error| chain(&error))?;
    let mut parts = Vec::new();
    for _ in 0..layers {
        let (part, mut files): (Part, _) = receive(socket).map_err(text)?;
        let mut next = || files.pop_front().ok_or("a descriptor is missing");
        parts.push(Layer {
            blob: next()?,
            unpacked: next()?,
            compression: part.compression,
            diff_id: part.diff_id,
        });
    }
    let done = assemble(parts, &file, &limits, userland.as_ref());
    done.map(|()| Reply::Done).map_err(|error| chain(&error))
}

fn text(error: io::Error) -> String {
    format!("converter cannot read its order: {error}")
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// Sends a message. Never waits: the messages of one image fit into the socket's buffer.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut ancillary, flags)?;
    Ok(())
}

/// Receives a message with at most three descriptors.
///
/// # Errors
/// Returns [`io::ErrorKind::UnexpectedEof`] if the other side has closed the socket.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
) -> io::Result<(T, std::collections::VecDeque<File>)> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let received = recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut files = std::collections::VecDeque::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            files.extend(descriptors.map(|descriptor: OwnedFd| File::from(descriptor)));
        }
    }
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((serde_json::from_slice(&bytes[..received.bytes])?, files))
}
