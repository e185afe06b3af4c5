//! Identities for VMs that are started without the pool.

use std::{
    fs::File,
    io::{self, Read},
};

use model::{EntropySeed, Identity};

/// An identity with a machine id and entropy from the host's random generator.
///
/// # Errors
/// Returns an error if /dev/urandom cannot be read.
pub fn fresh_identity(hostname: &str) -> io::Result<Identity> {
    let mut source = File::open("/dev/urandom")?;
    let (mut seed, mut id) = ([0; 32], [0; 16]);
    source.read_exact(&mut seed)?;
    source.read_exact(&mut id)?;
    Ok(Identity {
        hostname: hostname.to_owned(),
        machine_id: format!("{:032x}", u128::from_be_bytes(id)),
        entropy: EntropySeed::new(seed),
    })
}
