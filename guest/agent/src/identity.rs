//! The identity of the guest. Every clone of a snapshot resumes as the same machine. `POST /init` gives it its own
//! identity before the agent serves any request except `/health`.
//!
//! Order: the request is checked first, so that an invalid one changes nothing. Then the kernel's random generator
//! is reseeded, the clock is set, and host name, machine ID and network card are configured. Before the first two
//! steps, random bytes may repeat those of other clones, and the time is stale.

use std::{
    fs::File,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::Path,
};

use envd::{InitRequest, Timestamp};
use nix::{
    errno::Errno,
    sys::time::TimeSpec,
    time::{ClockId, clock_settime},
    unistd::sethostname,
};

use crate::{
    network, sys,
    trust::{self, Trust},
};

/// The target of `POST /init`.
pub(crate) enum Duties {
    /// The guest; the agent is PID 1.
    Machine(Box<Machine>),
    /// Outside a guest: the request is only checked.
    None,
}

/// Files that hold the identity, opened at boot so that clones need not look up paths.
pub(crate) struct MachineFiles {
    /// Mounted at /etc/machine-id.
    pub(crate) machine_id: File,
    /// Mounted at /proc/sys/kernel/random/boot_id.
    pub(crate) boot_id: File,
    /// Mounted at /etc/hosts.
    pub(crate) hosts: File,
    /// The sandbox's environment, read by servers that the template has started.
    pub(crate) envs: File,
    /// /dev/urandom.
    pub(crate) random: File,
}

/// The guest and its current identity.
pub(crate) struct Machine {
    files: MachineFiles,
    layer: Option<OwnedFd>,
    machine_id: String,
    hostname: String,
    network: bool,
    trust: Trust,
}

/// An identity could not be applied.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IdentityError {
    /// The request is invalid; nothing was changed.
    #[error("{0}")]
    Invalid(&'static str),
    /// A system call failed; earlier steps remain applied.
    #[error("cannot {what}")]
    System {
        what: &'static str,
        #[source]
        source: std::io::Error,
    },
}

fn cannot<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> IdentityError {
    move |source| IdentityError::System {
        what,
        source: source.into(),
    }
}

impl Duties {
    /// The writable layer's directory. `None` outside a guest, or if the kernel mounted the root itself.
    pub(crate) fn layer(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Machine(machine) => machine.layer(),
            Self::None => None,
        }
    }

    /// Checks a request and applies it. Returns whether [`Duties::variables`] has changed.
    ///
    /// # Errors
    /// Returns [`IdentityError::Invalid`] for a malformed value, [`IdentityError::System`] for a failed system call.
    pub(crate) fn apply(&mut self, request: &InitRequest) -> Result<bool, IdentityError> {
        let entropy = check(request)?;
        match self {
            Self::Machine(machine) => machine.apply(request, &entropy),
            Self::None => Ok(false),
        }
    }

    /// Variables that name the authority of `/init` for processes. Empty if there is none, or outside a guest.
    pub(crate) fn variables(&self) -> Vec<(String, String)> {
        match self {
            Self::Machine(machine) => machine.trust.variables(),
            Self::None => Vec::new(),
        }
    }

    /// Writes the sandbox's environment, a JSON object, for servers that the template has started. Does nothing outside
    /// a guest.
    pub(crate) fn publish_environment(&self, json: &[u8]) -> Result<(), IdentityError> {
        match self {
            Self::Machine(machine) => {
                let failed = cannot("write the environment");
                let envs = &machine.files.envs;
                let len = envs
                    .metadata()
                    .map_err(cannot("stat the environment file"))?
                    .len();
                let len = usize::try_from(len).unwrap_or(usize::MAX);
                replace(envs, json, len).map_err(failed)
            }
            Self::None => Ok(()),
        }
    }
}

/// Checks all values. Returns the entropy as bytes; empty if the request has none.
fn check(request: &InitRequest) -> Result<Vec<u8>, IdentityError> {
    let invalid = |ok: bool, text| {
        if ok {
            Ok(())
        } else {
            Err(IdentityError::Invalid(text))
        }
    };
    let name = request.hostname.as_deref();
    invalid(
        name.is_none_or(is_label),
        "hostname must be 1 to 63 letters, digits and inner hyphens",
    )?;
    let id = request.machine_id.as_deref();
    invalid(
        id.is_none_or(|id| id.len() == 32 && id.bytes().all(is_lower_hex)),
        "machineId must be 32 lower-case hex digits",
    )?;
    let entropy = request.entropy.as_deref().map(bytes_of_hex);
    let good = entropy.as_ref().is_none_or(|bytes| {
        bytes
            .as_ref()
            .is_some_and(|b| (1..=sys::MAX_ENTROPY).contains(&b.len()))
    });
    invalid(good, "entropy must be 1 to 512 bytes in hex")?;
    let ca = request.ca_bundle.as_deref().unwrap_or_default();
    invalid(
        ca.is_empty() || trust::is_authority(ca),
        "caBundle must be certificates in PEM of at most 64 KiB",
    )?;
    Ok(entropy.flatten().unwrap_or_default())
}

fn is_label(name: &str) -> bool {
    let inner = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
    (1..=63).contains(&name.len())
        && name.bytes().all(inner)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

fn is_lower_hex(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'a'..=b'f')
}

fn bytes_of_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |b: u8| {
        char::from(b)
            .to_digit(16)
            .and_then(|d| u8::try_from(d).ok())
    };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let bytes = pairs
        .iter()
        .map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?));
    bytes
        .collect::<Option<Vec<u8>>>()
        .filter(|_| rest.is_empty())
}

impl Machine {
    /// `dir` is a tmpfs directory for files that are created later.
    pub(crate) fn new(files: MachineFiles, layer: Option<OwnedFd>, dir: &Path) -> Self {
        Self {
            trust: Trust::new(dir),
            files,
            layer,
            machine_id: String::new(),
            hostname: String::new(),
            network: false,
        }
    }

    /// The writable layer's directory; `None` if the kernel mounted the root itself.
    pub(crate) fn layer(&self) -> Option<BorrowedFd<'_>> {
        self.layer.as_ref().map(AsFd::as_fd)
    }

    fn apply(&mut self, request: &InitRequest, entropy: &[u8]) -> Result<bool, IdentityError> {
        if !entropy.is_empty() {
            let reseeded = sys::reseed_kernel(self.files.random.as_fd(), entropy);
            reseeded.map_err(cannot("reseed the kernel's random generator"))?;
        }
        if let Some(time) = request.timestamp {
            set_clock(time).map_err(cannot("set the clock"))?;
        }
        if let Some(name) = request.hostname.as_deref().filter(|n| *n != self.hostname) {
            sethostname(name).map_err(cannot("set the host name"))?;
            self.name_in_hosts(name)
                .map_err(cannot("write /etc/hosts"))?;
            name.clone_into(&mut self.hostname);
        }
        if let Some(id) = request
            .machine_id
            .as_deref()
            .filter(|id| *id != self.machine_id)
        {
            let line = format!("{id}\n");
            replace(&self.files.machine_id, line.as_bytes(), 33)
                .map_err(cannot("write /etc/machine-id"))?;
            let boot = random_uuid().map_err(cannot("generate a boot id"))?;
            replace(&self.files.boot_id, boot.as_bytes(), 37)
                .map_err(cannot("write the boot id"))?;
            id.clone_into(&mut self.machine_id);
        }
        if let Some(on) = request.network.filter(|on| *on != self.network) {
            network::switch(on).map_err(cannot("set the network card"))?;
            self.network = on;
        }
        match &request.ca_bundle {
            Some(pem) => (self.trust.set(pem)).map_err(cannot("install the certificate authority")),
            None => Ok(false),
        }
    }

    /// Maps [`OWN_ADDRESS`] to the name in /etc/hosts, because sudo must resolve it. Lines that begin with that
    /// address, such as the one for the previous name, are removed.
    fn name_in_hosts(&self, name: &str) -> std::io::Result<()> {
        let len = self.files.hosts.metadata()?.len().min(MAX_HOSTS);
        let mut old = vec![0; usize::try_from(len).unwrap_or_default()];
        let len = self.files.hosts.read_at(&mut old, 0)?;
        old.truncate(len);
        let new = hosts_with(&String::from_utf8_lossy(&old), name);
        replace(&self.files.hosts, new.as_bytes(), len)
    }
}

/// Bytes of /etc/hosts that are kept; a longer file is truncated.
const MAX_HOSTS: u64 = 64 << 10;
/// The address that Debian gives the machine's own name.
const OWN_ADDRESS: &str = "127.0.1.1";

fn hosts_with(old: &str, name: &str) -> String {
    let others = |line: &&str| !line.starts_with(OWN_ADDRESS);
    let mut new: String = old.lines().filter(others).flat_map(|l| [l, "\n"]).collect();
    new.extend([OWN_ADDRESS, "\t", name, "\n"]);
    new
}

/// Overwrites a small file in place. Truncates it only if its previous length, `old_len`, was greater.
fn replace(file: &File, bytes: &[u8], old_len: usize) -> std::io::Result<()> {
    file.write_all_at(bytes, 0)?;
    if old_len > bytes.len() {
        file.set_len(u64::try_from(bytes.len()).unwrap_or(u64::MAX))?;
    }
    Ok(())
}

fn set_clock(time: Timestamp) -> Result<(), Errno> {
    let ns = std::time::Duration::from_nanos(time.unix_ns());
    clock_settime(ClockId::CLOCK_REALTIME, TimeSpec::from_duration(ns))
}

/// A random UUID (RFC 9562, version 4), with a newline.
fn random_uuid() -> Result<String, Errno> {
    let mut bytes = sys::random_bytes()?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let mut text = String::with_capacity(37);
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        for nibble in [byte >> 4, byte & 15] {
            text.push(char::from_digit(u32::from(nibble), 16).unwrap_or('0'));
        }
    }
    text.push('\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_with(change: impl FnOnce(&mut InitRequest)) -> bool {
        let mut request = InitRequest::default();
        change(&mut request);
        check(&request).is_ok()
    }

    #[test]
    fn bad_identities_are_refused() {
        assert!(check_with(|_| ()));
        assert!(check_with(|r| r.hostname = Some("a-1".into())));
        for bad in ["", "-a", "a-", "a.b", "a\n", &"a".repeat(64)] {
            assert!(!check_with(|r| r.hostname = Some(bad.into())), "{bad:?}");
        }
        assert!(check_with(
            |r| r.machine_id = Some("0123456789abcdef".repeat(2))
        ));
        assert!(!check_with(
            |r| r.machine_id = Some("0123456789ABCDEF".repeat(2))
        ));
        let pem = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n";
        assert!(check_with(|r| r.ca_bundle = Some(pem.into())));
        assert!(check_with(|r| r.ca_bundle = Some(String::new())));
        for bad in ["x".to_owned(), format!("{pem}\0"), pem.repeat(1300)] {
            assert!(!check_with(|r| r.ca_bundle = Some(bad.clone())), "{bad:?}");
        }
        assert!(check_with(|r| r.entropy = Some("00ff".into())));
        for bad in ["", "0", "0g", &"00".repeat(513)] {
            assert!(!check_with(|r| r.entropy = Some(bad.into())), "{bad:?}");
        }
    }

    #[test]
    fn a_new_name_replaces_the_previous_one() {
        let hosts = hosts_with("127.0.0.1 localhost\n127.0.1.1 old\n::1 localhost", "new");
        assert_eq!(
            hosts,
            "127.0.0.1 localhost\n::1 localhost\n127.0.1.1\tnew\n"
        );
    }

    #[test]
    fn uuids_have_version_and_variant() {
        let uuid = random_uuid().unwrap();
        assert_eq!((uuid.len(), &uuid[14..15], &uuid[36..]), (37, "4", "\n"));
        assert_ne!(uuid, random_uuid().unwrap());
    }
}
