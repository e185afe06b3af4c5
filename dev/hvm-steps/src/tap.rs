//! The host's end of a VM's network: a TAP with an address, and a TCP echo server.

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
/// Addresses of both ends, from the range for network tests (RFC 2544).
pub(crate) const HOST: Ipv4Addr = Ipv4Addr::new(198, 18, 77, 1);
pub(crate) const GUEST: Ipv4Addr = Ipv4Addr::new(198, 18, 77, 2);

/// An open TAP. The kernel removes the interface when this descriptor and the VMM's copy are closed.
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
        sys::make_tap(fd.as_fd(), NAME).with_context(|| format!("cannot create TAP {NAME}"))?;
        sys::configure(NAME, HOST, MASK)
            .with_context(|| format!("cannot assign {HOST} to TAP {NAME}"))?;
        Ok(Self { fd })
    }
}

/// Starts a TCP server that echoes one connection after another. Returns its port.
pub(crate) fn echo_server() -> Result<u16> {
    let listener = TcpListener::bind((HOST, 0))?;
    let port = listener.local_addr()?.port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            if let Ok(mut back) = stream.try_clone() {
                // If the echo fails, the step in the guest fails with its own message.
                let _ = io::copy(&mut &stream, &mut back);
            }
        }
    });
    Ok(port)
}
