//! System calls that several attempts make.

use std::path::Path;

use nix::libc;

use super::{
    intruder::{Intruder, Stop, Try},
    scene::SECRET,
};

/// Directory descriptor for `…at` system calls: relative paths start at the working directory.
pub(super) const AT_CWD: i64 = libc::AT_FDCWD as i64;

impl Intruder {
    pub(super) fn open(&mut self, path: impl AsRef<Path>, flags: i32) -> Try<i64> {
        let path = self.path(path.as_ref())?;
        self.call(
            "openat",
            libc::SYS_openat,
            &[AT_CWD, path, flags.into(), 0o600],
        )
    }

    pub(super) fn write(&mut self, descriptor: i64, bytes: &[u8]) -> Try<()> {
        let at = self.put(bytes)?;
        let wanted = length(bytes)?;
        let done = self.call("write", libc::SYS_write, &[descriptor, at, wanted])?;
        expect("bytes written", done, wanted)
    }

    /// Opens a file and writes to its beginning.
    pub(super) fn overwrite(&mut self, path: impl AsRef<Path>, bytes: &[u8]) -> Try<()> {
        let descriptor = self.open(path, libc::O_WRONLY)?;
        self.write(descriptor, bytes)
    }

    /// Reads from a descriptor at an offset, and checks that the bytes are the secret.
    pub(super) fn read_secret(&mut self, descriptor: i64, at: u64, secret: &[u8]) -> Try<()> {
        let room = self.room(SECRET)?;
        let arguments = [descriptor, room, length(secret)?, at.cast_signed()];
        self.call("pread64", libc::SYS_pread64, &arguments)?;
        self.compare(room, secret)
    }

    /// Checks that the secret is at this address of the process's memory.
    pub(super) fn compare(&self, at: i64, secret: &[u8]) -> Try<()> {
        if self.get(at, secret.len())? == secret {
            Ok(())
        } else {
            Err(Stop::Broken("the bytes are not the secret".to_owned()))
        }
    }

    pub(super) fn socket(&mut self, family: i32, kind: i32, protocol: i32) -> Try<i64> {
        let arguments = [family.into(), kind.into(), protocol.into()];
        self.call("socket", libc::SYS_socket, &arguments)
    }

    /// Makes a system call whose arguments are a socket, an address and the address's length.
    pub(super) fn with_address(
        &mut self,
        (name, number): (&'static str, i64),
        socket: i64,
        address: &[u8],
    ) -> Try<i64> {
        let at = self.put(address)?;
        self.call(name, number, &[socket, at, length(address)?])
    }

    pub(super) fn ioctl(&mut self, descriptor: i64, request: u64, argument: i64) -> Try<i64> {
        let arguments = [descriptor, request.cast_signed(), argument];
        self.call("ioctl", libc::SYS_ioctl, &arguments)
    }

    pub(super) fn fcntl(&mut self, descriptor: i64, command: i32, argument: i64) -> Try<i64> {
        let arguments = [descriptor, command.into(), argument];
        self.call("fcntl", libc::SYS_fcntl, &arguments)
    }

    /// Maps a private page that is readable and writable.
    pub(super) fn page(&mut self) -> Try<i64> {
        let rights = i64::from(libc::PROT_READ | libc::PROT_WRITE);
        let flags = i64::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        self.call("mmap", libc::SYS_mmap, &[0, 4096, rights, flags, -1, 0])
    }

    /// Creates a pair of connected stream sockets, and returns their descriptors.
    pub(super) fn socket_pair(&mut self) -> Try<(i64, i64)> {
        let both = self.room(8)?;
        let (family, kind) = (libc::AF_UNIX.into(), libc::SOCK_STREAM.into());
        self.call("socketpair", libc::SYS_socketpair, &[family, kind, 0, both])?;
        let read = self.get(both, 8)?;
        let number = |at: usize| {
            let bytes = read.get(at..at + 4).and_then(|four| four.try_into().ok());
            i64::from(i32::from_ne_bytes(bytes.unwrap_or_default()))
        };
        Ok((number(0), number(4)))
    }
}

pub(super) fn length(bytes: &[u8]) -> Try<i64> {
    i64::try_from(bytes.len()).map_err(|error| Stop::Broken(error.to_string()))
}

pub(super) fn expect(what: &str, got: i64, wanted: i64) -> Try<()> {
    if got == wanted {
        Ok(())
    } else {
        Err(Stop::Broken(format!("{what}: {got} instead of {wanted}")))
    }
}

/// `sockaddr_un` of a path, or of an abstract name if the first byte is zero.
pub(super) fn unix_address(name: &[u8]) -> Vec<u8> {
    let mut address = vec![1, 0];
    address.extend(name);
    if name.first() != Some(&0) {
        address.push(0);
    }
    address
}

/// `sockaddr_in` of a port on the loopback interface.
pub(super) fn loopback(port: u16) -> Vec<u8> {
    let [high, low] = port.to_be_bytes();
    vec![2, 0, high, low, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]
}

/// `sockaddr_in6` of a port at `::ffff:127.0.0.1`.
pub(super) fn mapped_loopback(port: u16) -> Vec<u8> {
    let [high, low] = port.to_be_bytes();
    let mut address = vec![10, 0, high, low, 0, 0, 0, 0];
    address.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 127, 0, 0, 1]);
    address.extend([0; 4]);
    address
}
