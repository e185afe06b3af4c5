//! The command line.

use std::{net::SocketAddr, path::PathBuf};

/// The directory in which the template installs the hosts.
const HOSTS: &str = "/usr/local/lib/cube-interpreter";
/// The directory in which the guest agent keeps state that differs between clones.
const STATE: &str = "/run/cube";
pub(crate) const USAGE: &str = "usage: cube-interpreter [--supervise] [--warm] [--listen ADDRESS] [--vsock PORT] [--hosts DIR] [--state DIR]";

/// The program's options.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) supervise: bool,
    /// The hosts that start with the server run warm-up code, for a snapshot.
    pub(crate) warm: bool,
    pub(crate) listen: SocketAddr,
    /// A vsock port on which the machine that runs the guest reaches the server directly; `None` outside guests.
    pub(crate) vsock: Option<u32>,
    pub(crate) hosts: PathBuf,
    pub(crate) state: PathBuf,
    /// A kernelspec's directory: run as the host of that kernel instead of as the server.
    pub(crate) kernel: Option<PathBuf>,
}

impl Config {
    /// Parses the arguments; `None` if an option is unknown, or its value is missing or malformed.
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Option<Self> {
        let mut config = Self {
            supervise: false,
            warm: false,
            listen: SocketAddr::from(([127, 0, 0, 1], 49_999)),
            vsock: None,
            hosts: HOSTS.into(),
            state: STATE.into(),
            kernel: None,
        };
        while let Some(flag) = arguments.next() {
            match flag.as_str() {
                "--supervise" => config.supervise = true,
                "--warm" => config.warm = true,
                "--listen" => config.listen = arguments.next()?.parse().ok()?,
                "--vsock" => config.vsock = Some(arguments.next()?.parse().ok()?),
                "--hosts" => config.hosts = arguments.next()?.into(),
                "--kernel" => config.kernel = Some(arguments.next()?.into()),
                "--state" => config.state = arguments.next()?.into(),
                _ => return None,
            }
        }
        Some(config)
    }
}
