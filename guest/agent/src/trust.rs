//! The certificate authority from `/init`, which the guest trusts in addition to the system's, for requests that
//! the host's proxy rewrites.
//!
//! Nothing is written to the layer. Two files on a tmpfs hold the authorities: `ca-bundle.crt` (the system's
//! authorities and this one), which is mounted over the system's bundles, and `ca.crt` (only this one). Environment
//! variables point programs with their own bundles to them. Another file is mounted over each of Java's trust
//! stores. Neither snapshots of the disk nor templates therefore contain the authority.

mod java;

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use nix::{fcntl::OFlag, mount::MsFlags};

/// Paths of the system's authorities: Debian, Alpine and Arch; Alpine's LibreSSL; Fedora; openSUSE.
const SYSTEM: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/ssl/cert.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
];
/// Maximum size of a system bundle and of a Java trust store. A longer bundle is cut off at a line end; a longer
/// store is not parsed as one.
const MAX_SYSTEM: u64 = 4 << 20;
/// Maximum size of the authority's text.
pub(crate) const MAX_CA: usize = 64 << 10;
const BUNDLE: &str = "ca-bundle.crt";
const ALONE: &str = "ca.crt";
/// Variables of OpenSSL and Python; requests and pip; curl; git; the AWS tools.
const NAME_BUNDLE: [&str; 5] = [
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "AWS_CA_BUNDLE",
];
/// Maximum number of Java trust stores to change.
const MAX_STORES: usize = 16;
/// Variable of Node.js, which adds this file to its built-in authorities.
const NAME_ALONE: &str = "NODE_EXTRA_CA_CERTS";

/// Whether a text can be a PEM authority. It must not corrupt the bundle's other certificates.
pub(crate) fn is_authority(pem: &str) -> bool {
    let is_plain = |b: u8| b.is_ascii_graphic() || matches!(b, b' ' | b'\n' | b'\r');
    pem.len() <= MAX_CA
        && pem.bytes().all(is_plain)
        && pem.contains("-----BEGIN CERTIFICATE-----")
        && pem.contains("-----END CERTIFICATE-----")
}

/// The currently trusted authority.
#[derive(Debug)]
pub(crate) struct Trust {
    /// Directory on a tmpfs.
    dir: PathBuf,
    /// The system's authorities, read before the bundle was mounted over them. `None`: it is not mounted.
    system: Option<Vec<u8>>,
    /// Java trust stores with a file mounted over them. The number of the file is the index here.
    java: Vec<PathBuf>,
    /// Empty: no authority.
    pem: String,
}

impl Trust {
    pub(crate) fn new(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            system: None,
            java: Vec::new(),
            pem: String::new(),
        }
    }

    /// Trusts this authority instead of the previous one; an empty text removes it. Files and mounts then stay,
    /// because running programs may use their paths. Returns whether anything has changed.
    pub(crate) fn set(&mut self, pem: &str) -> io::Result<bool> {
        if pem == self.pem {
            return Ok(false);
        }
        let (bundle, alone) = (self.dir.join(BUNDLE), self.dir.join(ALONE));
        write(&alone, &[pem.as_bytes()])?;
        let write_bundle = |system: &[u8]| write(&bundle, &[system, b"\n", pem.as_bytes()]);
        if let Some(system) = &self.system {
            write_bundle(system)?;
        } else {
            let targets = targets(SYSTEM);
            let system = targets.first().map(|path| read_system(path));
            let system = system.transpose()?.unwrap_or_default();
            write_bundle(&system)?;
            for target in targets {
                mount(&bundle, &target)?;
            }
            self.system = Some(system);
        }
        self.set_in_java(pem);
        pem.clone_into(&mut self.pem);
        Ok(true)
    }

    /// Does the same in Java's trust stores. Files that are already mounted are rewritten, and further stores get
    /// one. An unusable store is left alone: programs in the guest may move or change it at any time.
    fn set_in_java(&mut self, pem: &str) {
        let system = self.system.as_deref().unwrap_or_default();
        let copy = |store: &Path, number: usize| -> io::Result<Option<PathBuf>> {
            let Some(bytes) = java::with_authority(&read(store)?, system, pem) else {
                return Ok(None);
            };
            let file = java::file(&self.dir, number);
            write(&file, &[&bytes])?;
            Ok(Some(file))
        };
        let mut mounted = self.java.clone();
        for (number, store) in self.java.iter().enumerate() {
            if let Err(why) = copy(store, number) {
                left_alone(store, &why);
            }
        }
        for store in targets(java::names()).into_iter().take(MAX_STORES) {
            if mounted.contains(&store) {
                continue;
            }
            let placed = copy(&store, mounted.len())
                .and_then(|file| file.map(|file| mount(&file, &store)).transpose());
            match placed {
                Ok(Some(())) => mounted.push(store),
                Ok(None) => {}
                Err(why) => left_alone(&store, &why),
            }
        }
        self.java = mounted;
    }

    /// Variables for processes, which may override them.
    pub(crate) fn variables(&self) -> Vec<(String, String)> {
        if self.pem.is_empty() {
            return Vec::new();
        }
        let path = |name: &str| self.dir.join(name).to_string_lossy().into_owned();
        let bundle = NAME_BUNDLE.iter().map(|name| (*name, path(BUNDLE)));
        let all = bundle.chain([(NAME_ALONE, path(ALONE))]);
        all.map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

fn left_alone(store: &Path, why: &io::Error) {
    let (store, why) = (store.to_string_lossy(), why.to_string());
    crate::console::log(&["cannot use Java's trust store ", &store, ": ", &why].concat());
}

/// The distinct files behind those names that exist.
fn targets(names: impl IntoIterator<Item = impl AsRef<Path>>) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    let paths = names.into_iter();
    for path in paths.filter_map(|name| fs::canonicalize(name).ok()) {
        if path.is_file() && !found.contains(&path) {
            found.push(path);
        }
    }
    found
}

fn mount(file: &Path, target: &Path) -> io::Result<()> {
    let nothing = None::<&str>;
    nix::mount::mount(Some(file), target, nothing, MsFlags::MS_BIND, nothing)?;
    Ok(())
}

/// The first [`MAX_SYSTEM`] bytes of a file. A file that a program in the guest has put there must not block the
/// agent.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(OFlag::O_NONBLOCK.bits());
    let mut bytes = Vec::new();
    options
        .open(path)?
        .take(MAX_SYSTEM)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The system's bundle.
fn read_system(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = read(path)?;
    if bytes.len() as u64 == MAX_SYSTEM {
        let end = bytes.iter().rposition(|b| *b == b'\n');
        bytes.truncate(end.unwrap_or_default());
    }
    Ok(bytes)
}

/// Replaces the content of a file in place, because the file may be mounted elsewhere.
fn write(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let mut file = File::create(path)?;
    parts.iter().try_for_each(|part| file.write_all(part))
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;

    const PEM: &str = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n";

    #[test]
    fn names_of_one_file_are_one_target() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        fs::write(path("a"), "").unwrap();
        std::os::unix::fs::symlink(path("a"), path("b")).unwrap();
        let (a, b, none, directory) = (path("a"), path("b"), path("c"), path("."));
        let found = targets([&none, &b, &a, &directory]);
        assert_eq!(found, [fs::canonicalize(&a).unwrap()]);
    }

    #[test]
    fn a_long_bundle_of_the_system_is_cut_at_a_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let most = usize::try_from(MAX_SYSTEM).unwrap();
        fs::write(&path, format!("line\n{}", "x".repeat(most))).unwrap();
        assert_eq!(read_system(&path).unwrap(), b"line");
    }

    /// Needs root, because it mounts files in its own mount namespace.
    #[test]
    fn net_the_bundle_is_mounted_over_that_of_the_system_and_taken_back() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        nix::mount::mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
        let Some(target) = targets(SYSTEM).into_iter().next() else {
            println!("skipped: this system has no bundle of authorities");
            return;
        };
        let system = fs::read_to_string(&target).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut trust = Trust::new(dir.path());
        assert!(!trust.set("").unwrap() && trust.variables().is_empty());
        assert!(trust.set(PEM).unwrap() && !trust.set(PEM).unwrap());
        let expected = format!("{system}\n{PEM}");
        assert_eq!(fs::read_to_string(&target).unwrap(), expected);
        let variables = trust.variables();
        let value = |name: &str| {
            let found = variables.iter().find(|(other, _)| other == name).unwrap();
            fs::read_to_string(&found.1).unwrap()
        };
        assert_eq!(value("SSL_CERT_FILE"), expected);
        assert_eq!(value("NODE_EXTRA_CA_CERTS"), PEM);
        let other = PEM.replace("AA", "BB");
        assert!(trust.set(&other).unwrap());
        assert_eq!(
            fs::read_to_string(&target).unwrap(),
            format!("{system}\n{other}")
        );
        assert!(trust.set("").unwrap() && trust.variables().is_empty());
        assert_eq!(fs::read_to_string(&target).unwrap(), format!("{system}\n"));
    }
}
