//! The private certificate authority that `cube-api ca init` creates for one server.
//!
//! | file | content | mode |
//! |---|---|---|
//! | `ca.crt` | the authority's certificate, for clients | 0644 |
//! | `ca.key` | the authority's key, needed only to issue further certificates | 0600 |
//! | `server.crt` | the server's certificate, followed by the authority's | 0644 |
//! | `server.key` | the server's key | 0600 |
//!
//! The certificate covers the domain, every name directly below it, `localhost`, 127.0.0.1 and ::1. Existing files are
//! never overwritten, so a second call cannot destroy a key that clients trust. When [`init`] returns, all files survive a
//! crash of the host. A name constraint limits the authority
//! to the domain and all names below it, `localhost` and loopback addresses: a stolen authority key cannot be used to
//! impersonate other sites.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use pki::{
    Authority, CidrSubnet, GeneralSubtree, KeyPair, NameConstraints, Purpose, authority, leaf,
};

use model::quoted;

/// Validity of the certificates in days. Some clients refuse server certificates that are valid for more than 825 days.
const VALID_DAYS: u32 = 820;
const PUBLIC: u32 = 0o644;
const SECRET: u32 = 0o600;

/// Paths of the created files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaFiles {
    /// For clients.
    pub ca_certificate: PathBuf,
    /// Should be stored away from the server.
    pub ca_key: PathBuf,
    /// For `tls.certificate`.
    pub certificate: PathBuf,
    /// For `tls.key`.
    pub key: PathBuf,
}

/// Why the files could not be created. After an error, some of them may exist.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// The domain is not a DNS name that a certificate can contain.
    #[error("{0:?} is not a domain name: use lower-case labels separated by dots, without a port")]
    Domain(String),
    #[error("{0} exists and would be overwritten: choose another directory, or remove the file")]
    Exists(PathBuf),
    #[error("cannot write {path}")]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot create a certificate")]
    Make(#[from] pki::Error),
}

/// Creates an authority and a server certificate for `domain` in `dir`, which is created if it does not exist.
///
/// # Errors
/// Returns [`CaError::Domain`] for an invalid domain, [`CaError::Exists`] if one of the files exists (existing files
/// are neither read nor changed), [`CaError::Make`] if a certificate cannot be created, and [`CaError::Write`] if a
/// file cannot be written.
pub fn init(dir: &Path, domain: &str) -> Result<CaFiles, CaError> {
    check_domain(domain)?;
    let files = CaFiles::below(dir);
    for path in files.all() {
        if path.symlink_metadata().is_ok() {
            return Err(CaError::Exists(path.clone()));
        }
    }
    let made = make(domain)?;
    let failed = |source| CaError::Write {
        path: dir.to_owned(),
        source,
    };
    let is_new = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
    let new_directories = dir.ancestors().take_while(is_new).count();
    let created = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    created.map_err(failed)?;
    write(&files.ca_key, &made.ca_key, SECRET)?;
    write(&files.key, &made.key, SECRET)?;
    write(&files.ca_certificate, &made.ca_certificate, PUBLIC)?;
    let chain = format!("{}{}", made.certificate, made.ca_certificate);
    write(&files.certificate, &chain, PUBLIC)?;
    sync_names(dir, new_directories).map_err(failed)?;
    Ok(files)
}

/// Syncs the directory entries of the files in `dir`, and of as many new directories that lead to it.
fn sync_names(dir: &Path, new_directories: usize) -> io::Result<()> {
    let dir = dir.canonicalize()?;
    let mut named = dir.ancestors().take(new_directories + 1);
    named.try_for_each(|path| File::open(path)?.sync_all())
}

impl CaFiles {
    fn below(dir: &Path) -> Self {
        Self {
            ca_certificate: dir.join("ca.crt"),
            ca_key: dir.join("ca.key"),
            certificate: dir.join("server.crt"),
            key: dir.join("server.key"),
        }
    }

    fn all(&self) -> [&PathBuf; 4] {
        [
            &self.ca_certificate,
            &self.ca_key,
            &self.certificate,
            &self.key,
        ]
    }

    /// Shell commands that set the environment variables of clients. `authority` must be the domain, with the server's
    /// port unless the port is 443.
    #[must_use]
    pub fn environment(&self, authority: &str) -> String {
        let path = fs::canonicalize(&self.ca_certificate);
        let path = path.unwrap_or_else(|_| self.ca_certificate.clone());
        let path = quoted(&path.to_string_lossy());
        format!(
            "export E2B_DOMAIN={authority}  # needs DNS; without it, set E2B_API_URL and E2B_SANDBOX_URL\n\
             export SSL_CERT_FILE={path}        # Python\n\
             export NODE_EXTRA_CA_CERTS={path}  # JavaScript\n"
        )
    }
}

fn check_domain(domain: &str) -> Result<(), CaError> {
    let is_label = |label: &str| {
        let is_inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        (1..=63).contains(&label.len())
            && label.bytes().all(is_inner)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let is_domain = domain.len() <= 200
        && domain.split('.').all(is_label)
        // Four numbers separated by dots are an IP address, not a domain.
        && domain.parse::<IpAddr>().is_err();
    if is_domain {
        Ok(())
    } else {
        Err(CaError::Domain(domain.chars().take(256).collect()))
    }
}

struct Made {
    ca_certificate: String,
    ca_key: String,
    certificate: String,
    key: String,
}

fn make(domain: &str) -> Result<Made, CaError> {
    let name = format!("cube-api private CA for {domain}");
    let mut params = authority(&name, VALID_DAYS);
    let loopback = |address: IpAddr, bits| {
        GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix(address, bits))
    };
    params.name_constraints = Some(NameConstraints {
        permitted_subtrees: vec![
            GeneralSubtree::DnsName(domain.to_owned()),
            GeneralSubtree::DnsName("localhost".to_owned()),
            loopback(Ipv4Addr::LOCALHOST.into(), 8),
            loopback(Ipv6Addr::LOCALHOST.into(), 128),
        ],
        excluded_subtrees: Vec::new(),
    });
    let ca = Authority::create(params, KeyPair::generate()?)?;
    let hosts = [
        domain,
        &format!("*.{domain}"),
        "localhost",
        "127.0.0.1",
        "::1",
    ];
    let server = leaf(
        domain,
        hosts.map(str::to_owned),
        VALID_DAYS,
        &[Purpose::ServerAuth],
    )?;
    let key = KeyPair::generate()?;
    Ok(Made {
        certificate: ca.sign(&server, &key)?.pem(),
        key: key.serialize_pem(),
        ca_certificate: ca.certificate().to_owned(),
        ca_key: ca.key().serialize_pem(),
    })
}

fn write(path: &Path, text: &str, mode: u32) -> Result<(), CaError> {
    let opened = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path);
    let written = opened.and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    written.map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => CaError::Exists(path.to_owned()),
        _ => CaError::Write {
            path: path.to_owned(),
            source,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn existing_files_are_kept_and_keys_are_private() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("new/ca");
        let files = init(&dir, "e2b.test").unwrap();
        let mode = |path: &PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&files.key), mode(&files.ca_key)), (0o600, 0o600));
        let before = fs::read(&files.key).unwrap();
        assert!(matches!(init(&dir, "e2b.test"), Err(CaError::Exists(_))));
        fs::remove_file(&files.ca_certificate).unwrap();
        assert!(matches!(init(&dir, "e2b.test"), Err(CaError::Exists(_))));
        assert_eq!(fs::read(&files.key).unwrap(), before);
        assert!(!files.ca_certificate.exists());
    }

    #[test]
    fn only_domain_names_are_accepted() {
        for wrong in [
            "",
            ".",
            "a..b",
            "e2b.test:8443",
            "*.e2b.test",
            "E2B.test",
            "-a.b",
            "127.0.0.1",
            "a_b.c",
        ] {
            assert!(
                matches!(check_domain(wrong), Err(CaError::Domain(_))),
                "{wrong}"
            );
        }
        for right in ["e2b.test", "localhost", "a-1.b.c"] {
            assert!(check_domain(right).is_ok(), "{right}");
        }
    }

    #[test]
    fn the_environment_has_the_variables_of_both_sdks() {
        let files = CaFiles::below(Path::new("/it's here"));
        assert_eq!(
            files.environment("e2b.test:8443"),
            "export E2B_DOMAIN=e2b.test:8443  # needs DNS; without it, set E2B_API_URL and E2B_SANDBOX_URL\n\
             export SSL_CERT_FILE='/it'\\''s here/ca.crt'        # Python\n\
             export NODE_EXTRA_CA_CERTS='/it'\\''s here/ca.crt'  # JavaScript\n"
        );
    }

    #[test]
    fn the_created_certificate_can_be_served() {
        let dir = tempfile::tempdir().unwrap();
        let files = init(dir.path(), "e2b.test").unwrap();
        super::super::load(&files.certificate, &files.key).unwrap();
        let other = init(&dir.path().join("b"), "e2b.test").unwrap();
        let mixed = super::super::load(&files.certificate, &other.key);
        assert!(matches!(mixed, Err(super::super::TlsError::Unusable(_))));
        let swapped = super::super::load(&files.key, &files.key);
        assert!(swapped.is_err());
    }
}
