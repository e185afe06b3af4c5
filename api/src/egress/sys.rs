//! Unsafe code of this module.
#![expect(
    unsafe_code,
    reason = "a descriptor with a fixed number is passed to a program between fork and exec"
)]

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::process::CommandExt,
    },
    process::{Child, Command},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, fcntl},
};

/// Minimum number of the passed copy: above every fixed number.
const ABOVE: RawFd = 64;

/// Starts a program that inherits `fd` as descriptor number `number`.
///
/// # Errors
/// Returns the errors of fcntl(2) and of starting the program.
pub(super) fn spawn_with(
    mut command: Command,
    fd: BorrowedFd<'_>,
    number: RawFd,
) -> io::Result<Child> {
    let copy = duplicate(fd, ABOVE)?;
    // Keeps the number in use here, so that the standard library's own pipe to the child cannot get it.
    let null = File::open("/dev/null")?;
    let _placeholder = duplicate(null.as_fd(), number)?;
    let source = copy.as_raw_fd();
    // SAFETY: `pre_exec` needs a closure that is safe between fork and exec, in a process with other threads: it makes one
    // system call, dup2(2), which is async-signal-safe, and allocates nothing. `source` is open there because `copy` lives
    // until `spawn` has returned. The new descriptor is not closed at exec, as dup2(2) leaves FD_CLOEXEC out.
    unsafe {
        command.pre_exec(move || match libc_dup2(source, number) {
            Ok(()) => Ok(()),
            Err(errno) => Err(errno.into()),
        });
    }
    command.spawn()
}

fn libc_dup2(from: RawFd, to: RawFd) -> Result<(), Errno> {
    // SAFETY: dup2(2) takes any numbers; the descriptor that had the number `to` is, in the child, one that is closed at
    // exec anyway. Nothing is kept from the call.
    Errno::result(unsafe { nix::libc::dup2(from, to) }).map(drop)
}

/// A copy with the lowest free number that is at least `lowest`. Close-on-exec.
fn duplicate(fd: BorrowedFd<'_>, lowest: RawFd) -> io::Result<OwnedFd> {
    let number = fcntl(fd, FcntlArg::F_DUPFD_CLOEXEC(lowest))?;
    // SAFETY: `from_raw_fd` needs an open descriptor without another owner: fcntl has just made it. This holds until the
    // `OwnedFd` is dropped.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
        process::Stdio,
    };

    use super::*;

    #[test]
    fn a_program_inherits_a_descriptor_with_its_number_and_no_other() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let listing = || {
            let mut command = Command::new("/bin/sh");
            command
                .args(["-c", "readlink /proc/self/fd/3; ls /proc/self/fd"])
                .stdout(Stdio::piped());
            command
        };
        let read = |mut child: Child| {
            let mut text = String::new();
            child
                .stdout
                .take()
                .unwrap()
                .read_to_string(&mut text)
                .unwrap();
            child.wait().unwrap();
            text
        };
        // The test runner may have passed on descriptors. One more is for the socket, and one line for its name.
        let others = read(listing().spawn().unwrap());
        let others = others.lines().filter(|line| line.parse::<u32>().is_ok());
        let text = read(spawn_with(listing(), listener.as_fd(), 3).unwrap());
        assert!(text.starts_with("socket:["), "{text}");
        assert_eq!(text.lines().count(), others.count() + 2, "{text}");
        drop(listener);
        assert!(
            TcpStream::connect(address).is_err(),
            "a copy of the listener is open"
        );
    }

    #[test]
    fn a_program_that_does_not_exist_is_an_error() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"x").unwrap();
        let missing = Command::new("/nonexistent/program");
        assert!(spawn_with(missing, file.as_fd(), 3).is_err());
    }
}
