//! The host's end of a VM's network: a TAP with an address, and a TCP server that sends back what it gets.

use std::{
    fs::{File, OpenOptions},
    io,
    net::{Ipv4Addr, TcpListener},
    os::fd::AsFd,
    thread,
};

use anyhow::{Context, Result};

use crate::sys;

const NAME: &str = "hvmsteps0";
const MASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 252);
/// Addresses of both ends, from the range for tests of networks (RFC 2544).
pub(crate) const HOST: Ipv4Addr = Ipv4Addr::new(198, 18, 77, 1);
pub(crate) const GUEST: Ipv4Addr = Ipv4Addr::new(198, 18, 77, 2);

/// Gone when it and the VMM's copy are closed.
#[derive(Debug)]
pub(crate) struct Tap {
    pub(crate) fd: File,
}

impl Tap {
    pub(crate) fn open() -> Result<Self> {
        let fd = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/net/tun")
            .context("cannot open /dev/net/tun")?;
        sys::make_tap(fd.as_fd(), NAME).context("cannot make a TAP")?;
        sys::configure(NAME, HOST, MASK).context("cannot give the TAP its address")?;
        Ok(Self { fd })
    }
}

/// Serves one connection after another on a thread; its port.
pub(crate) fn echo_server() -> Result<u16> {
    let listener = TcpListener::bind((HOST, 0))?;
    let port = listener.local_addr()?.port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            if let Ok(mut back) = stream.try_clone() {
                // The guest's side says what went wrong.
                let _ = io::copy(&mut &stream, &mut back);
            }
        }
    });
    Ok(port)
}
